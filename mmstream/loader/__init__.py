"""The last stages: order -> read -> decode -> batch -> LOADER -> DEVICE.

loader.py              `Loader`: this rank's batches in step order, their state, and what they
                       hold; packs dealt to the ranks by their cost
batch_makers.py        the processes that make batches: this one, workers with their side of it, the
                       reader process
watchdog.py            notices a batch that does not come; what a worker works on, and how it ended
batch_transport.py     a batch crosses from a worker to the main process
settings.py            what must be the same on every rank, in words
device.py              batches on the device, one ahead of the user's code, and normalised there
"""

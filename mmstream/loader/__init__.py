"""The fifth stage: order -> read -> decode -> batch -> LOADER -> device.

loader.py              `Loader`: this rank's batches in step order, and their state
workers.py             the parent's side of worker processes
watchdog.py            notices a batch that does not come
worker_group.py        what a worker works on, and how it ended, in words
worker_process.py      the child's side
batch_transport.py     a batch crosses from a worker to the main process
"""

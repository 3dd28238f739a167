"""The fourth stage: order -> read -> decode -> BATCH -> loader -> device.

collate.py  makes a batch of the samples of a step: a dict of tensors and lists
flat.py     makes batches without padding, by `Flat` and `Pack`: documents one after the other
valid.py    tells which tokens belong to rows that are not valid, and which are targets; their loss
split.py    cuts a delivered batch into micro-batches, or along its tokens
kinds.py    the kinds of batches: what each asks of a pipeline, its order, its function
lengths.py  how long samples become, counted without pixels: what packs are planned by; the plan of
            a pipeline that packs, found by its name and checked
"""

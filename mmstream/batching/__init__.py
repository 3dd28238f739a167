"""The fourth stage: order -> read -> decode -> BATCH -> loader -> device.

collate.py   makes a batch of the samples of a step: a dict of tensors and lists
join.py      joins the values of a field: numbers, arrays, pictures, videos, recordings
batching.py  settings of batches without padding: `Flat` and `Pack`
lengths.py   how long samples become, counted without pixels: what packs are planned by
find_plan.py the plan of a pipeline that packs, found by its name and checked
flat.py      makes them: documents one behind the other
valid.py     tells which tokens belong to rows that are not valid, and which are targets; their loss
split.py     cuts a delivered batch into micro-batches
"""

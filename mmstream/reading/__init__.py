"""The second stage: order -> READ -> decode -> batch -> loader -> device.

step.py     what is asked for (`Job`), and the record of a step from here to the logs
reader.py   reads the steps of this process
blocks.py   local files: a few steps at once, as late as possible
windows.py  object stores, where no reader process reads them: window by window, ahead of their use
fetcher.py  (shard, index) pairs -> byte ranges -> samples
large_samples.py  samples with large files: their first bytes, and the rest when it is decoded
held.py     samples that were read together, until they are taken
packed_rows.py  which samples make a row, where rows are packs
lookup.py   single samples, for second reads and substitutes

Remote storage is read by a process of its own, one for each rank:

process.py      the main process' side: starts it, tells it where to begin, ends it
plan.py         order -> ranges of shards, and when each is needed first
window_memory.py  what its windows take, and what to do where that is too much
range_cache.py  its ranges in the node cache
sample_memory.py  where samples arrive, seen by the processes that take them
arrived.py      what came of ranges and steps, and what lies in the node cache instead
rank_reader.py  requests ranges ahead, holds them, and hands out steps
server.py       serves steps to workers and to the main process
messages.py     what they say to each other
step_reader.py  a worker's side, in the place of reader.py
cached_seats.py  samples that a worker reads from the node cache by itself
"""

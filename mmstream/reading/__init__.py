"""The second stage: order -> READ -> decode -> batch -> loader -> device.

step.py     what is asked for (`Job`), the rows of packs, and the record of a step to the logs
reader.py   steps of this process: of local files, or from the reader process
fetcher.py  (shard, index) pairs -> byte ranges -> samples, which are held until they are taken, of
            large files only what is asked for; single ones for second reads

Remote storage is read by a process of its own, one for each rank:

process.py      the side of the other processes: its start and end, and what they say to each other
plan.py         order -> ranges of shards, when each is needed first, and the memory for them
range_cache.py  its ranges in the node cache
rank_reader.py  requests ranges ahead, holds them, and hands out steps
server.py       serves steps to workers and to the main process, from memory that all of them see
"""

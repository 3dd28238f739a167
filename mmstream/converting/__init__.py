"""Before the flow: rows (JSONL) and media files become shards, once.

    convert.py      `mm.convert`: goes through the steps below, for each dataset of a conversion
    rows.py         1. a file of rows -> the byte range of each row
    plan.py         2. which rows go into which shard
    formats.py      3. one row -> a `Draft`, the same shape for every format
    dialogue.py        3a. the turns of a conversation
    fields.py          3b. typed values, media keys, the id
    draft.py           3c. the `Draft`, and the samples that it gives
    media.py        4. the bytes of the row's media files
    shard.py        5. tar, index and report of one shard
    rejects.py      the rows that became no sample, for each shard and for all
    pool.py         several shards at a time, by worker processes
    destination.py  before the first shard and after the last: marker, rejects, manifest
    captions.py     rows of captions -> rows of conversations, to convert afterwards

The output depends only on the rows, the media and the options. Every run writes the same bytes,
with any number of workers, and also after it was killed and started again.
"""

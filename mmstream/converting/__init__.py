"""Before the flow: rows and media files become shards, once.

    convert.py      `mm.convert`: goes through the steps below, for each dataset of a conversion;
                    `mm.finalize`: ranges of shards -> a dataset; what the first rows would become
    options.py      the options in groups, those that change the output, those of the command line
    rows/           1. whatever holds the rows -> a source of rows
    plan.py         2. which rows go into which shard, by media too; rejected rows again
    outputs.py         the datasets to write: what they hold already, their locks, marker, jobs;
                       after the last shard: rejects, manifest
    formats/        3. one row -> a `Draft`, the same shape for every format
    draft.py           the `Draft`, and the samples that it gives
    media/          4. the bytes of the row's media
    shard.py        5. tar, index and report of one shard; several at a time: worker processes, or
                       tasks of Ray
    sidecar.py      a Parquet file of what each shard holds; hashes of media, texts and pictures
    report.py       what the rows became, in numbers; the rows that became no sample
    duplicates.py   what a corpus holds twice, what two corpora share
    reshard.py      `mm.reshard`: rewrites a dataset in the order of its packs

The output depends only on the rows, the media and the options. Every run writes the same bytes,
with any number of workers, and also after it was killed and started again.
"""

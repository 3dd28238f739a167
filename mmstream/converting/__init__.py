"""Before the flow: rows and media files become shards, once.

    convert.py      `mm.convert`: goes through the steps below, for each dataset of a conversion
    options.py      the options that change the output
    rows/           1. whatever holds the rows -> a source of rows
    columns.py         columns under other names: some row must have them
    plan.py         2. which rows go into which shard
    outputs.py         the datasets to write: what they hold already, their locks, their jobs
    formats/        3. one row -> a `Draft`, the same shape for every format
    draft.py           the `Draft`, and the samples that it gives
    media/          4. the bytes of the row's media
    shard.py        5. tar, index and report of one shard
    url_secrets.py     what of a URL is not published
    sidecar.py      a Parquet file of what each shard holds
    arrow_columns.py   its columns
    rejects.py      the rows that became no sample, for each shard and for all
    report.py       what the rows became, in numbers
    hashed_file.py  the bytes of a tar, written and hashed by a thread
    unwarned.py     warnings about pictures kept off the screen
    live_counts.py  the rows so far, from any process to the progress bar
    progress.py     the progress bar
    engines/        several shards at a time
    quality/        what a corpus holds twice
    locks.py        one writer, or several of different ranges of shards
    retry.py        rejected rows again, in extra shards
    finalize.py     `mm.finalize`: ranges of shards -> a dataset
    destination.py  before the first shard and after the last: marker, rejects, manifest
    reshard.py      `mm.reshard`: a dataset anew, in the order of its packs
    stored_samples.py  samples of a dataset on their way into that one
    dry_run.py      what the first rows would become

The output depends only on the rows, the media and the options. Every run writes the same bytes,
with any number of workers, and also after it was killed and started again.
"""

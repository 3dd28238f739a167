"""Step 1 of a conversion: rows, whatever holds them.

open.py         what the caller named -> files of rows, folders of media -> a `RowSource`
plain_files.py  files of rows -> plain local files, as records; rows inside an object, groups
fetch.py        patterns, URLs, standard input, compressed files and tars -> plain files
detect.py       what a file is, by its content, its encoding, and how rows are read
tables.py       csv and tsv, transcripts, COCO's annotations, arrays of JSON
arrow.py        Arrow, Parquet, iterables, data frames -> JSON values and bytes
samples.py      samples of another data set, to be written again
folders.py      a folder or prefix: files of rows, tars, pictures
records.py      `RowSource`; rows by their byte ranges: lines of JSON, or the spool's
"""

"""Step 1 of a conversion: rows, whatever holds them.

open.py         what the caller named -> plain local files, as records -> a `RowSource`; groups
fetch.py        patterns, URLs, standard input, compressed files and tars -> plain files
detect.py       what a file is, by its content, its encoding, and how rows are read
tables.py       csv and tsv, transcripts, COCO's annotations, arrays of JSON, rows inside an object
arrow.py        Arrow, Parquet, iterables, data frames -> JSON values and bytes
samples.py      samples of another data set, to be written again
folders.py      a folder or prefix: files of rows, tars, pictures
records.py      `RowSource`; rows by their byte ranges: lines of JSON, or the spool's
"""

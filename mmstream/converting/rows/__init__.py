"""Step 1 of a conversion: rows, whatever holds them.

open.py         what the caller named -> plain local files, as records -> a `RowSource`; groups
fetch.py        patterns, URLs, standard input, compressed files and tars -> plain files
detect.py       what a file is, by its content, and its encoding
tables.py       csv and tsv, transcripts, COCO's annotations, arrays of JSON, rows inside an object
arrow.py        Arrow, Parquet, iterables, data frames -> JSON values and bytes
folders.py      a folder or prefix: files of rows, tars, pictures
records.py      `RowSource`; rows by their byte ranges: lines of JSON, or the spool's; samples of
                another data set, to be written again
"""

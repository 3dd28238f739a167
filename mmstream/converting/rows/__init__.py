"""Step 1 of a conversion: rows, whatever holds them.

open.py         what the caller named -> a `RowSource`
inputs.py       what the caller named -> files of rows, folders of media
options.py      how rows are read
plain_files.py  files of rows -> plain local files, as records
source.py       what every source gives: `RowSource`, `RowRange`, `Row`
fetch.py        patterns, URLs, standard input -> files
detect.py       what a file is, by its content
compressed.py   gzip, zstd, bzip2, xz
json_text.py    JSON as Python writes it, with NaN
json_values.py  a JSON array, or a stream of objects -> lines
tables.py       csv and tsv
coco.py         COCO's annotation files
arrow.py        Arrow's streams and Feather files
parquet.py      Parquet files, read where they lie
python_rows.py  iterables, data frames, data sets of Hugging Face
values.py       values of Python and Arrow -> JSON values and bytes
transcripts.py  transcripts of LibriSpeech and LJSpeech
nested.py       an object with the rows inside
samples.py      samples of another data set, to be written again
tars.py         tars that cannot be read at any place -> plain local ones
folders.py      a folder or prefix: files of rows, tars, pictures
lerobot.py      episodes of a data set of LeRobot
groups.py       consecutive rows about one medium -> one row
spool.py        rows without lines of their own -> one temporary file
records.py      rows by their byte ranges: lines of JSON, records of a spool
identity.py     what decides the split of a row
"""

"""Datasets on storage: shards, their indexes, and the files that describe them.

open.py          a name -> a `Dataset`
dataset.py       a dataset: its length, its order, random access to samples
shards.py        bytes and raw samples of its shards
keys.py          samples by key, and by shard[index] as logs name them
files.py         the files that say what a dataset is, other JSON, and the README.md
manifest.py      mmstream.json: shards and counts; the seal of such files
index.py         NAME.tar.idx and NAME.tar.crc32c: where each sample starts, and its checksum
index_part.py    mmstream.index.HEX: the same for many shards, named by its content
shard_indexes.py where samples lie, by parts or by the files beside tars; copies of remote files
index_tars.py    make indexes and a manifest for tars that others wrote
columns.py       what sidecars say of each sample: NAME.parquet
bad_list.py      mmstream.bad.json: samples that no epoch shows
mixture.py       several datasets with weights, read as one, and the JSON file of them
condition.py     conditions over the columns of samples
source.py        what the stages ask of a dataset or a mixture
verify.py        read everything, and report what is wrong
"""

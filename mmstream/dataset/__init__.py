"""Datasets on storage: shards, their indexes, and the files that describe them.

open.py          a name -> a `Dataset`
dataset.py       a dataset: its length, its order, random access; what the stages ask of any source
shards.py        bytes and raw samples of its shards
keys.py          samples by key, and by shard[index] as logs name them
manifest.py      mmstream.json: shards and counts; the seal of such files, and other JSON
index.py         NAME.tar.idx and NAME.tar.crc32c: where each sample starts, and its checksum;
                 mmstream.index.HEX: the same for many shards, named by its content
shard_indexes.py where samples lie, by parts or by the files beside tars; the commit of a dataset;
                 copies of remote files
index_tars.py    make indexes and a manifest for tars that others wrote
columns.py       what sidecars say of each sample: NAME.parquet
bad_list.py      mmstream.bad.json and mmstream.removed.json: samples that no epoch shows
mixture.py       several datasets with weights, read as one, and the JSON file of them
condition.py     conditions over the columns of samples
select.py        the samples of conditions, splits and buckets, and selections that are stored
verify.py        read everything, and report what is wrong
"""

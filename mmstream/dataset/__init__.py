"""What lies on storage: shards, their indexes, and the files that describe them.

open.py          a name -> a `Dataset`
dataset.py       length, indexes, random access to raw samples
manifest.py      mmstream.json: shards and counts
index.py         NAME.tar.idx: where each sample starts
index_tars.py    make indexes and a manifest for tars that others wrote
bad_list.py      mmstream.bad.json: samples that no epoch shows
mixture.py       several datasets with weights, read as one
mixture_file.py  the JSON file that describes a mixture
source.py        what the stages ask of a dataset or a mixture
verify.py        read everything, and report what is wrong
"""

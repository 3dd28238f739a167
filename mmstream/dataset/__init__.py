"""What lies on storage: shards, their indexes, and the files that describe them.

open.py          a name -> a `Dataset`
dataset.py       length, indexes, random access to raw samples
keys.py          samples by key, and by shard[index] as logs name them
files.py         the files that say what a dataset is, other JSON, and the README.md
sealed.py        the checksum that each of them carries
manifest.py      mmstream.json: shards and counts
index.py         NAME.tar.idx: where each sample starts
index_part.py    mmstream.index.HEX: the same for many shards, named by its content
shard_indexes.py where samples lie, by parts, which are cached, or by the files beside tars
checksums.py     NAME.tar.crc32c: a checksum of each sample
index_tars.py    make indexes and a manifest for tars that others wrote
facts.py         NAME.tar.facts: texts and the sizes of pictures
bad_list.py      mmstream.bad.json: samples that no epoch shows
mixture.py       several datasets with weights, read as one, and the JSON file of them
source.py        what the stages ask of a dataset or a mixture; whole shards, in long ranges
statistics.py    measure some samples: sizes, words, tokens, classes
verify.py        read everything, and report what is wrong
"""

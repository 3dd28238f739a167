"""What lies on storage: shards, their indexes, and the files that describe them.

open.py          a name -> a `Dataset`
picture_hint.py  a hint for those who name a folder of pictures
readme.py        the README.md of a folder, for readers of Hugging Face
dataset.py       length, indexes, random access to raw samples
keys.py          samples by key
addresses.py     samples by shard[index], as logs name them
positions.py     a sample's position in its dataset <-> its shard and index
files.py         the files that say what a dataset is: they are read, or there are none
sealed.py        the checksum that each of them carries
manifest.py      mmstream.json: shards and counts
index.py         NAME.tar.idx: where each sample starts
index_part.py    mmstream.index.HEX: the same for many shards, named by its content
index_writer.py  writes such a part
json_file.py     small JSON files, such as the marker of a conversion
index_cache.py   parts of remote indexes as files of this machine
part_reader.py   reads the columns of shards from a part
shard_indexes.py where samples lie, by parts or by the files beside tars
shard_samples.py the samples of a shard, in order, in long ranges
checksums.py     NAME.tar.crc32c: a checksum of each sample
crc_combine.py   the checksum of a tar from those of its samples
index_tars.py    make indexes and a manifest for tars that others wrote
facts.py         NAME.tar.facts: texts and the sizes of pictures
bad_list.py      mmstream.bad.json: samples that no epoch shows
mixture.py       several datasets with weights, read as one
mixture_file.py  the JSON file that describes a mixture
source.py        what the stages ask of a dataset or a mixture
statistics.py    measure some samples: sizes, words, tokens, classes
verify.py        read everything, and report what is wrong
"""

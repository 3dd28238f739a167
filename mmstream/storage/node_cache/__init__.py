"""Samples of remote shards on a disk of this machine, so that the next epoch need not fetch them.

    cache_file.py  one file: some samples of one shard, each with its CRC-32C
    node_cache.py  reads files at once, and writes them in a thread; what goes when room ends

All processes of a machine share the folder. There is no server and no process that must end well:
a file is usable as soon as its first sample is in it, and whatever a crash left is noticed when it
is read. A sample that was written once stays while a run plans it: each epoch needs each sample
once, so nothing could take its place that is needed sooner.
"""

from mmstream.storage.node_cache.cache_file import CachedSamples, CacheFile, CacheLocation
from mmstream.storage.node_cache.node_cache import NodeCache, open_cache_dir

__all__ = ["CacheFile", "CacheLocation", "CachedSamples", "NodeCache", "open_cache_dir"]

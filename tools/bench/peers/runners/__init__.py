"""The programs that run in the environments of the other loaders, one per loader and benchmark.

`decoded`, `resume` and `grid` hold what the runners of one benchmark share, and `tars` what the
loaders of tars share. Run as ``python -m tools.bench.peers.runners.NAME``.
"""

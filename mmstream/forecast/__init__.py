"""What a run will cost and how fast it will be, said before it starts.

reads.py          what an epoch asks of object storage, from the plan alone
large_reads.py    what decoders read of large samples, from a few of them
run.py            what a whole run does: starts, epochs, node caches, prices
equal_samples.py  a dataset on paper, to plan a run over
connections.py    storage alone, with 1 to 64 connections
stages.py         the CPU time of a sample, stage by stage
speed.py          what was measured, what limits it, and what follows for a run
bench.py          measures a pipeline on this machine, from storage to the batch
"""

"""Who writes the shards of a conversion: jobs in, reports out.

engine.py      the engine of a name
processes.py   worker processes of this machine
ray.py         tasks of a Ray cluster
"""

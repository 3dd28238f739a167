"""Who writes the shards of a conversion: jobs in, reports out.

processes.py   worker processes of this machine
"""

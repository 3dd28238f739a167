"""Beside the flow: what a run was to deliver, and whether its logs say that it did.

training_log.py  sample lineage in training logs: written and read
check_log.py     logs against the plan
replay.py        which samples any step delivers, from its state alone, and their keys
"""

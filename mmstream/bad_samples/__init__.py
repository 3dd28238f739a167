"""Bad samples: what is allowed, what is counted, what is written down.

policy.py  what a run does about a bad sample, and how many it tolerates
"""

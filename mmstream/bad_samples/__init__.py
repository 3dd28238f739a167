"""Bad samples: what a run does about them, what is counted, what is written down.

    policy.py      what happens to the row of a bad sample, and how many a run tolerates
    quarantine.py  quarantine-rank{r}.jsonl: one record per bad sample, written and read here
    limits.py      all counts of a loader, ``loader.stats``; stops a run with too many bad samples

Workers replace bad samples (``decoding/substitute.py``); their records travel with the batch. The
main process of the rank counts them in the order of steps. ``dataset/bad_list.py`` is the list of
samples that no epoch shows.
"""

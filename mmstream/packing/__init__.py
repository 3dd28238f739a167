"""Plans of packs: which samples form one row of a batch, decided once, from their lengths.

    planner.py       the lengths of all samples: a measure, as a file for each shard; a measure ->
                     groups of shards -> packs of samples -> a plan, and its report
    plan.py          a plan: limits, documents and sums of its units, its files; those of a mixture
                     as one
    order.py         the order over packs, of a dataset or a mixture, answered in samples
    cost.py          what a unit costs a model, and which rank takes which row of a step

A plan is integers: it needs no tokenizer, no torch and none of the tars.
"""

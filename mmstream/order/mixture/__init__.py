"""The order of a mixture: several datasets as one stream with exact proportions.

    order.py     the steps of the mixture; the same methods as `Order`; its settings, and what a
                 saved state stores of them
    schedule.py  lane and position -> source; row -> lane draw of a source
    source.py    draw of a source -> (shard, index), epoch after epoch of that source

Words used in all of these files:

- A lane makes one *draw* at each of its positions: it takes the next sample of one source.
- A *lane draw* counts the draws of one lane from one source, from 0.
- A *source draw* counts the draws of all lanes from one source, from 0.
- A *round* is P consecutive steps: one step of each group of lanes.
"""

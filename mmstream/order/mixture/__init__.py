"""The order of a mixture: several corpora as one stream with exact proportions.

order.py     steps of the mixture
recipe.py    its settings, and what a saved state says of them
schedule.py  which source each position of a lane takes, in closed form
draws.py     which draw of which source each row of a step is
source.py    draws of one source -> its samples, epoch after epoch
"""

"""What the tests of docs/frameworks have in common; its modules are on pytest's path."""

import mmstream as mm
from mmstream._torchvision import import_torchvision

import_torchvision()  # before the frameworks do, where it does not load by itself

NUM_STEPS = 6
"""Of 16 samples, in an epoch of the fixture `corpus`."""


def keys_of(batches):
    return [batch["__key__"] for batch in batches]


def plan(pipeline, num_epochs):
    """The keys of each step of the first epochs, as a plain loop sees them."""
    loader = mm.Loader(pipeline)
    return [keys for _ in range(num_epochs) for keys in keys_of(loader)]

"""What the tests of docs/frameworks have in common; its modules are on pytest's path."""

from typing import Any

from torch import Tensor, nn

import mmstream as mm
from mmstream.families.family import import_torchvision
from mmstream.train.tokenizer import byte_tokenizer

import_torchvision()  # before the frameworks do, where it does not load by itself

NUM_STEPS = 6
"""Of 16 samples, in an epoch of the fixture `corpus`."""


def keys_of(batches):
    return [batch["__key__"] for batch in batches]


def plan(pipeline, num_epochs):
    """The keys of each step of the first epochs, as a plain loop sees them."""
    loader = mm.Loader(pipeline)
    return [keys for _ in range(num_epochs) for keys in keys_of(loader)]


def text_pipeline(shards: str) -> mm.Pipeline:
    """Captions as tokens, 16 rows per step: the quickest thing that trains a model."""
    text = mm.TextDecoder(byte_tokenizer(), max_length=32)
    return mm.Pipeline(
        mm.open_dataset(shards),
        global_batch_size=16,
        seed=0,
        before=(without_picture,),
        decode=mm.Decode(text=text),
    )


def without_picture(sample: dict[str, Any]) -> dict[str, Any]:
    """Leave out the file of the picture: Lightning looks at each byte of a batch one by one."""
    return {name: value for name, value in sample.items() if name != "jpg"}


class TextModel(nn.Module):
    """Predicts the next byte from the last one. Takes a whole batch and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 16)
        self.head = nn.Linear(16, 512)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        logits = self.head(self.embed(batch["input_ids"]))
        labels = batch["labels"][:, 1:].flatten()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)

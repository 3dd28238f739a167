"""Multimodal training data on plain WebDataset tars: each sample once, on any topology.

    mm.convert        rows.jsonl + media -> tar shards, indexes, manifest
    mm.open_dataset   length and random access
    mm.Pipeline       order -> read -> decode -> batch, as one value
    mm.Loader         runs it in worker processes, with a state that is one number
    mm.to_device      the last stage: batches on the device, one ahead

Names are loaded when they are first used, so that converting and planning need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmstream.batching import batch as batch
    from mmstream.batching import collate as collate
    from mmstream.converting import ConvertReport as ConvertReport
    from mmstream.converting import convert as convert
    from mmstream.dataset import Dataset as Dataset
    from mmstream.decoding import AnyResolution as AnyResolution
    from mmstream.decoding import Decode as Decode
    from mmstream.decoding import DynamicTiles as DynamicTiles
    from mmstream.decoding import ImageDecoder as ImageDecoder
    from mmstream.decoding import TextDecoder as TextDecoder
    from mmstream.decoding.lengths import ImageShape as ImageShape
    from mmstream.decoding.lengths import internvl_length as internvl_length
    from mmstream.decoding.lengths import llava_next_length as llava_next_length
    from mmstream.decoding.lengths import qwen_vl_length as qwen_vl_length
    from mmstream.decoding.stage import decode as decode
    from mmstream.device import Normalize as Normalize
    from mmstream.device import to_device as to_device
    from mmstream.display import show as show
    from mmstream.errors import ConfigError as ConfigError
    from mmstream.errors import DecodeError as DecodeError
    from mmstream.errors import ManifestError as ManifestError
    from mmstream.errors import MMStreamError as MMStreamError
    from mmstream.errors import SampleError as SampleError
    from mmstream.errors import ShardError as ShardError
    from mmstream.errors import SkipLimitError as SkipLimitError
    from mmstream.errors import SkipSample as SkipSample
    from mmstream.errors import StateError as StateError
    from mmstream.errors import StorageError as StorageError
    from mmstream.loader import Loader as Loader
    from mmstream.mixfile import open_mixture as open_mixture
    from mmstream.mixing import Mixture as Mixture
    from mmstream.opening import open_dataset as open_dataset
    from mmstream.order import Order as Order
    from mmstream.pipeline import Pipeline as Pipeline
    from mmstream.reading import read as read
    from mmstream.sample import sample_rng as sample_rng
    from mmstream.skip import SkipPolicy as SkipPolicy
    from mmstream.splitting import split_rows as split_rows
    from mmstream.world import World as World

__version__ = "0.1.0"

_HOMES = {
    "batching": ("batch", "collate"),
    "converting": ("ConvertReport", "convert"),
    "dataset": ("Dataset",),
    "decoding": ("AnyResolution", "Decode", "DynamicTiles", "ImageDecoder", "TextDecoder"),
    "decoding.lengths": ("ImageShape", "internvl_length", "llava_next_length", "qwen_vl_length"),
    "decoding.stage": ("decode",),
    "device": ("Normalize", "to_device"),
    "display": ("show",),
    "errors": (
        "ConfigError",
        "DecodeError",
        "MMStreamError",
        "ManifestError",
        "SampleError",
        "ShardError",
        "SkipLimitError",
        "SkipSample",
        "StateError",
        "StorageError",
    ),
    "loader": ("Loader",),
    "mixfile": ("open_mixture",),
    "mixing": ("Mixture",),
    "opening": ("open_dataset",),
    "order": ("Order",),
    "pipeline": ("Pipeline",),
    "reading": ("read",),
    "sample": ("sample_rng",),
    "skip": ("SkipPolicy",),
    "splitting": ("split_rows",),
    "world": ("World",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


if not TYPE_CHECKING:  # a type checker knows the names from above, and a typo as one

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'mmstream' has no attribute {name!r}")
        value = getattr(import_module(f"mmstream.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Multimodal training data on plain WebDataset tars.

Every sample is delivered exactly once per epoch, in the same global batches on any number of ranks
and workers. These are the steps, in the order of the data:

    mm.convert        rows and media files -> tar shards, indexes, a manifest
    mm.open_dataset   a dataset with a length and random access
    mm.Pipeline       a description: order -> read -> decode -> batch
    mm.Loader         runs a Pipeline in worker processes; its state is an epoch and a step
    mm.to_device      the last stage: batches on the GPU, one batch ahead

A name is imported when it is first used, so converting and planning do not load torch.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmstream import errors as errors
    from mmstream import families as families
    from mmstream.bad_samples.policy import BadSamplePolicy as BadSamplePolicy
    from mmstream.baking.bake import bake as bake
    from mmstream.batching.batching import Flat as Flat
    from mmstream.batching.batching import Pack as Pack
    from mmstream.batching.collate import collate as collate
    from mmstream.batching.split import split_rows as split_rows
    from mmstream.converting.convert import convert as convert
    from mmstream.converting.convert import finalize as finalize
    from mmstream.converting.options import DownloadOptions as DownloadOptions
    from mmstream.converting.options import Duplicates as Duplicates
    from mmstream.converting.options import MediaOptions as MediaOptions
    from mmstream.converting.options import Rerun as Rerun
    from mmstream.converting.options import RowReading as RowReading
    from mmstream.converting.options import Splitting as Splitting
    from mmstream.converting.quality.duplicates import find_duplicates as find_duplicates
    from mmstream.converting.quality.duplicates import find_leaks as find_leaks
    from mmstream.converting.reshard import reshard as reshard
    from mmstream.dataset.dataset import Dataset as Dataset
    from mmstream.dataset.mixture import Mixture as Mixture
    from mmstream.dataset.open import open_dataset as open_dataset
    from mmstream.dataset.statistics import statistics as statistics
    from mmstream.decoding.audio.decoder import AudioDecoder as AudioDecoder
    from mmstream.decoding.decode import Decode as Decode
    from mmstream.decoding.image.coordinates import Boxes as Boxes
    from mmstream.decoding.image.coordinates import Points as Points
    from mmstream.decoding.image.decoder import ImageDecoder as ImageDecoder
    from mmstream.decoding.sample_rng import one_segment as one_segment
    from mmstream.decoding.sample_rng import sample_rng as sample_rng
    from mmstream.decoding.text.decoder import TextDecoder as TextDecoder
    from mmstream.decoding.times import Times as Times
    from mmstream.decoding.video.decoder import VideoDecoder as VideoDecoder
    from mmstream.device.normalize import Normalize as Normalize
    from mmstream.device.to_device import to_device as to_device
    from mmstream.display.notebook import show as show
    from mmstream.errors import ConfigError as ConfigError
    from mmstream.errors import MMStreamError as MMStreamError
    from mmstream.errors import SampleError as SampleError
    from mmstream.errors import SkipSample as SkipSample
    from mmstream.errors import StateError as StateError
    from mmstream.lazy_bytes import LazyBytes as LazyBytes
    from mmstream.loader.loader import Loader as Loader
    from mmstream.measuring.plan import plan as plan
    from mmstream.order import Order as Order
    from mmstream.packing.cost import Cost as Cost
    from mmstream.packing.settings import PackLimits as PackLimits
    from mmstream.pipeline import Pipeline as Pipeline
    from mmstream.train.check_packing import check_packing as check_packing
    from mmstream.train.inputs import model_inputs as model_inputs
    from mmstream.world import World as World

__version__ = "0.1.0"

_NAMES_OF = {
    "bad_samples.policy": ("BadSamplePolicy",),
    "baking.bake": ("bake",),
    "batching.batching": ("Flat", "Pack"),
    "batching.collate": ("collate",),
    "batching.split": ("split_rows",),
    "converting.convert": ("convert", "finalize"),
    "converting.options": (
        "DownloadOptions",
        "Duplicates",
        "MediaOptions",
        "Rerun",
        "RowReading",
        "Splitting",
    ),
    "converting.quality.duplicates": ("find_duplicates", "find_leaks"),
    "converting.reshard": ("reshard",),
    "dataset.dataset": ("Dataset",),
    "dataset.mixture": ("Mixture",),
    "dataset.open": ("open_dataset",),
    "dataset.statistics": ("statistics",),
    "decoding.audio.decoder": ("AudioDecoder",),
    "decoding.image.decoder": ("ImageDecoder",),
    "decoding.decode": ("Decode",),
    "decoding.image.coordinates": ("Boxes", "Points"),
    "decoding.text.decoder": ("TextDecoder",),
    "decoding.times": ("Times",),
    "device.normalize": ("Normalize",),
    "device.to_device": ("to_device",),
    "display.notebook": ("show",),
    "errors": ("ConfigError", "MMStreamError", "SampleError", "SkipSample", "StateError"),
    "lazy_bytes": ("LazyBytes",),
    "loader.loader": ("Loader",),
    "measuring.plan": ("plan",),
    "packing.settings": ("PackLimits",),
    "order": ("Order",),
    "packing.cost": ("Cost",),
    "pipeline": ("Pipeline",),
    "train.check_packing": ("check_packing",),
    "train.inputs": ("model_inputs",),
    "decoding.sample_rng": ("one_segment", "sample_rng"),
    "decoding.video.decoder": ("VideoDecoder",),
    "world": ("World",),
}
_MODULES = ("errors", "families")  # modules that are public names themselves
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}
_MODULE_OF |= {name: name for name in _MODULES}

__all__ = sorted(_MODULE_OF)

if "MMSTREAM_MAIN_PROCESS" in os.environ:  # a worker that imports the main script, which may hang
    import_module("mmstream.processes").follow_while_starting()


if not TYPE_CHECKING:  # a type checker reads the imports above, and reports other names

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            if reason := import_module("mmstream.gone").instead_of(f"mm.{name}"):
                raise AttributeError(reason)
            module = sys.modules[__name__]  # Python suggests the nearest of its names
            raise AttributeError(
                f"module 'mmstream' has no attribute {name!r}", name=name, obj=module
            )
        home = import_module(f"mmstream.{_MODULE_OF[name]}")
        value = home if name in _MODULES else getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

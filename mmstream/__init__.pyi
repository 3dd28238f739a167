"""The public names, and the modules that they come from. `mmstream/__init__.py` reads this file."""

from mmstream import errors as errors, families as families
from mmstream.baking.bake import bake as bake
from mmstream.batching.collate import collate as collate
from mmstream.batching.flat import Flat as Flat, Pack as Pack
from mmstream.batching.processor import processor_collate as processor_collate
from mmstream.batching.split import (
    cut_sequence as cut_sequence,
    shift_labels as shift_labels,
    split_rows as split_rows,
)
from mmstream.converting.convert import convert as convert, finalize as finalize
from mmstream.converting.duplicates import (
    find_duplicates as find_duplicates,
    find_leaks as find_leaks,
)
from mmstream.converting.options import (
    DownloadOptions as DownloadOptions,
    Duplicates as Duplicates,
    MediaOptions as MediaOptions,
    Rerun as Rerun,
    RowReading as RowReading,
    Splitting as Splitting,
)
from mmstream.converting.reshard import reshard as reshard
from mmstream.dataset.dataset import Dataset as Dataset
from mmstream.dataset.mixture import Mixture as Mixture
from mmstream.dataset.open import open_dataset as open_dataset
from mmstream.decoding.audio import AudioDecoder as AudioDecoder
from mmstream.decoding.bad_samples import BadSamplePolicy as BadSamplePolicy
from mmstream.decoding.decode import Decode as Decode
from mmstream.decoding.followers import Boxes as Boxes, Points as Points, Times as Times
from mmstream.decoding.image.decoder import ImageDecoder as ImageDecoder
from mmstream.decoding.sample_rng import one_segment as one_segment, sample_rng as sample_rng
from mmstream.decoding.text.decoder import TextDecoder as TextDecoder
from mmstream.decoding.video.decoder import VideoDecoder as VideoDecoder
from mmstream.display.samples import show as show
from mmstream.errors import (
    ConfigError as ConfigError,
    MMStreamError as MMStreamError,
    SampleError as SampleError,
    SkipSample as SkipSample,
    StateError as StateError,
)
from mmstream.loader.device import Normalize as Normalize, to_device as to_device
from mmstream.loader.loader import Loader as Loader
from mmstream.measuring.plan import plan as plan
from mmstream.measuring.statistics import statistics as statistics
from mmstream.order import Buckets as Buckets, Order as Order, aspect_edges as aspect_edges
from mmstream.packing.cost import Cost as Cost
from mmstream.packing.plan import PackLimits as PackLimits
from mmstream.pipeline import Pipeline as Pipeline
from mmstream.ranks import World as World
from mmstream.tar.lazy_bytes import LazyBytes as LazyBytes
from mmstream.train.inputs import model_inputs as model_inputs

__version__: str
__all__: list[str]

"""Find functions of the user that draw from private generators, by calling them twice.

Before each call the generators of torch, numpy and random are seeded alike. A function whose two
results differ draws from elsewhere, or keeps something from call to call.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mmstream.decoding.sample_rng import is_user_function, kept_generators
from mmstream.errors import ConfigError, escaped
from mmstream.pipeline import Pipeline, PipelineRunner, copy_with
from mmstream.reading.step import Job
from mmstream.settings import PositiveInt, checked
from mmstream.tar.lazy_bytes import LazyBytes

_CURE = (
    "differs from call to call, so it draws from a generator of its own or keeps a state: begin it "
    "with augment.set_random_seed(int(mm.sample_rng(sample).integers(2**32))), or draw from "
    "mm.sample_rng(sample)"
)


@checked()
def check_functions(pipeline: Pipeline, num_samples: PositiveInt = 16) -> list[str]:
    """Call the functions of a pipeline twice for a few samples, with the same seeds.

    A function that passes gives the same pixels on every topology and after a resume. That holds
    for all that draws from the generators of torch, numpy and random, such as torchvision.

    Args:
        pipeline: Its ``before``, decoders, ``transforms`` and ``collate`` are called.
        num_samples: The samples of its first step, at most. A function that seldom draws needs
            more.

    Returns:
        One line for each function whose results differ, with what to write. Empty: all are right.

    Raises:
        ConfigError: `num_samples` is no number from 1 up. Or a function gets or returns what cannot
            be copied and compared, such as a function or an open file.
        MMStreamError: As the first batch of a loader would.

    Examples:
        >>> pipeline = mm.Pipeline(
        ...     mm.open_dataset("shards/"), global_batch_size=8, transforms=(lambda sample: sample,)
        ... )
        >>> from mmstream.audit import check_functions
        >>> check_functions(pipeline)
        []
    """
    differing: dict[str, None] = {}

    def twice(label: str, function: Any) -> Any:
        return _Twice(label, function, differing) if is_user_function(function) else function

    changes: dict[str, Any] = {
        name: tuple(
            twice(f"{name}[{i}]", function) for i, function in enumerate(getattr(pipeline, name))
        )
        for name in ("before", "transforms")
    }
    decode = pipeline.decode
    if decode is not None and decode.fields:
        functions = {*decode.table.parsers, *(value.name for value in decode.table.values)}
        fields = {
            name: twice(f"decode.{name}", field) if name.split(";")[0] in functions else field
            for name, field in decode.fields.items()
        }
        decode = replace(decode, fields=fields)
    if decode is not None and decode.text is not None and callable(decode.text.field):
        text = replace(decode.text, field=twice("text.field", decode.text.field))
        decode = replace(decode, text=text)
    changes |= {"decode": decode, "collate": twice("collate", pipeline.collate)}
    pipeline_twice = copy_with(pipeline, pipeline.order, changes)
    num_rows = min(num_samples, pipeline.order.global_batch_size)
    with kept_generators(), closing(PipelineRunner(pipeline_twice)) as runner:
        runner.batch(Job(0, 0, 0, num_rows))
    return [f"{name}: {_CURE}" for name in differing]


class _Pickler(pickle.Pickler):
    """Writes tensors by their content; pickle also writes where they lie."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        return tuple, ((str(value.dtype), tuple(value.shape), data.numpy().tobytes()),)


def _content(value: Any) -> bytes:
    """Return what two results have in common if they are the same."""
    content = io.BytesIO()
    _Pickler(content).dump(value)
    return content.getvalue()


@dataclass(frozen=True)
class _Twice:
    """A function that is called twice with the same argument and the same seeds."""

    label: str
    function: Callable[[Any], Any]
    differing: dict[str, None]

    @property
    def reads_ranges(self) -> bool:
        """Whether the function takes files by ranges (`Decode.reads_by_ranges`)."""
        return bool(getattr(self.function, "reads_ranges", False))

    def __call__(self, argument: Any) -> Any:
        states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
        first, content = self._outcome(argument)
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if content != self._outcome(argument)[1]:
            self.differing[self._shown] = None
        if isinstance(first, Exception):
            raise first
        return first

    @property
    def _shown(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return f"{self.label} {name}"

    def _outcome(self, argument: Any) -> tuple[Any, bytes]:
        """Return what the function makes of a copy, or its error, and what is compared of it."""
        values = argument.values() if isinstance(argument, dict) else ()
        kept: dict[int, Any] = {id(v): v for v in values if isinstance(v, LazyBytes)}
        copied = self._plain("gets", deepcopy, argument, kept)
        try:
            result = self.function(copied)
        except Exception as error:
            return error, type(error).__name__.encode()
        return result, self._plain("returns", _content, result)

    def _plain(self, does: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call what copies a value or writes it, which not every value allows."""
        try:
            return function(*arguments)
        except Exception as error:
            raise ConfigError(
                f"{self._shown} {does} what cannot be compared ({escaped(str(error))}): return "
                "tensors, arrays, numbers, texts, bytes, and lists and dicts of them"
            ) from error

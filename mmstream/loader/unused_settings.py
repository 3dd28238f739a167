"""What the log says of settings that have no effect in this run.

    Loader.iter_undelivered, once -> `log_unused_settings`

They are no errors: a script may set them for another dataset, or for more workers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from mmstream.bad_samples.policy import BadSamplePolicy
from mmstream.dataset.mixture import Mixture
from mmstream.pipeline import Pipeline
from mmstream.reading.process import needs_reader_process

__all__ = ["log_unused_settings"]

logger = logging.getLogger(__name__)

_LIMITS = (
    *("max_fraction", "min_samples", "max_consecutive"),
    *("max_length_error_fraction", "max_samples"),
)


def log_unused_settings(pipeline: Pipeline, worker_settings: tuple[str, ...]) -> None:
    """Log each setting that was given and does nothing, and why.

    Args:
        pipeline: what the loader runs, with the settings of the user.
        worker_settings: names of settings of workers that were given, where there are none.
    """
    for reason, names in _unused(pipeline, worker_settings):
        logger.info("without effect: %s, because %s", ", ".join(names), reason)


def _unused(
    pipeline: Pipeline, worker_settings: tuple[str, ...]
) -> Iterator[tuple[str, list[str]]]:
    """Yield (why, names) of settings that do nothing."""
    if not pipeline.shuffle:
        names = ("grid", "window", "window_bytes")
        given = [name for name in names if getattr(pipeline, name) is not None]
        if given:
            yield "shuffle=False keeps the order of the shards", given
    if pipeline.cache_dir is not None and not needs_reader_process(pipeline.dataset):
        yield "all shards are on this machine", ["cache_dir"]
    if isinstance(pipeline.dataset, Mixture) and not pipeline.drop_last:
        yield "no step of a mixture is partial", ["drop_last=False"]
    if worker_settings:
        yield "num_workers=0", list(worker_settings)
    policy = pipeline.bad_samples
    limits = [name for name in _LIMITS if getattr(policy, name) != getattr(BadSamplePolicy, name)]
    if policy.action == "raise" and limits:
        yield 'action="raise" stops at the first bad sample', limits
    batching = pipeline.batching
    text = None if pipeline.decode is None else pipeline.decode.text
    if batching is not None and text is not None and text.padding == "max_length":
        yield "batching= pads no text", ['TextDecoder(padding="max_length")']

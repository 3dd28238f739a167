"""Many samples of plain files at once, with the compiled module where it is built.

The compiled module (mmstream/csrc/) copies each file once, into bytes of its own, and makes the
dicts. It takes samples as nearly all shards have them. It leaves all others to
`mmstream.tar.samples.parse_sample`, which knows the rest of the format and says what is wrong.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from types import ModuleType

from mmstream.types import IntArray, Sample

__all__ = ["plain_samples"]

logger = logging.getLogger(__name__)


def plain_samples(
    data: memoryview, starts: IntArray, stops: IntArray, urls: Sequence[str]
) -> list[Sample | None]:
    """Return the samples in a buffer, as `parse_sample` does. None: that must read it.

    Args:
        data: The bytes of tars.
        starts: Sample i is ``data[starts[i]:stops[i]]``.
        stops: Where each sample ends.
        urls: Of the shard of each sample.

    Returns:
        One entry per sample. All are None where the module is not built.
    """
    compiled = _load_compiled()
    if compiled is None:
        return [None] * len(urls)
    samples: list[Sample | None] = compiled.plain_samples(
        data, starts.tolist(), stops.tolist(), list(urls)
    )
    return samples


@functools.cache
def _load_compiled() -> ModuleType | None:
    """Import the compiled module, once. None where it was not built."""
    try:
        import mmstream.tar._plain_samples as compiled
    except ImportError:
        logger.debug("mmstream.tar._plain_samples is not built: Python reads all headers of tars")
        return None
    return compiled

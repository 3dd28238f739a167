"""`show`: what a notebook displays for a sample, a batch, a dataset, a pipeline or a loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmstream.display.contents import describe
from mmstream.display.markup import page
from mmstream.display.samples import batch_html, sample_html, samples_html
from mmstream.errors import ConfigError

__all__ = ["Shown", "show"]


@dataclass(frozen=True)
class Shown:
    """What `show` returns: HTML in a notebook, text elsewhere.

    Attributes:
        html: one ``<div>`` without scripts or links; images are embedded.
        text: one line per sample or batch.
    """

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def show(value: Any) -> Shown:
    """Return a view of samples, batches or datasets that a notebook displays.

    The output is bounded: long texts are cut, images are thumbnails, and of many rows the first are
    shown. Batches on a device are copied to the host. Datasets read their first samples, up to
    32 MiB; a Mixture, a Pipeline and a Loader read nothing.

    Args:
        value: a sample (raw or decoded), a list of samples (`Pipeline.take`), a batch (on the host
            or a device), a Dataset, a slice of a Dataset, a Mixture, a Pipeline or a Loader.

    Returns:
        An object that a notebook displays as HTML. Elsewhere its ``repr`` is text.

    Raises:
        ConfigError: `value` is none of these.

    Examples:
        >>> dataset = mm.open_dataset("shards/")
        >>> mm.show(dataset[0])
        <sample 000000001: ...>
    """
    if hasattr(value, "_repr_html_"):
        return Shown(value._repr_html_(), repr(value))
    if isinstance(value, Mapping) and isinstance(value.get("__key__"), str):
        return Shown(sample_html(value), describe(value))
    if isinstance(value, Mapping) and isinstance(value.get("__key__"), list):
        return Shown(batch_html(value), describe(value))
    if isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value):
        return Shown(page(samples_html(value)), "\n".join(describe(item) for item in value))
    raise ConfigError(
        "show: give a sample, a list of samples, a batch, a Dataset, a Mixture, a Pipeline or a "
        f"Loader, not {type(value).__name__}"
    )

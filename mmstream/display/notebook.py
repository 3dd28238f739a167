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
    """Something to look at: HTML where a notebook asks for it, a line of text elsewhere."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def show(value: Any) -> Shown:
    """Return something that a notebook displays.

    Args:
        value: a sample (raw or decoded), a list of samples (`Pipeline.take`), a batch (on the host
            or a device), or a Dataset, a slice of one, a Mixture, a Pipeline or a Loader.

    Raises:
        ConfigError: nothing that can be shown.
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
        "show: a sample, a list of samples, a batch, a Dataset, a Mixture, a Pipeline or a Loader, "
        f"not {type(value).__name__}"
    )

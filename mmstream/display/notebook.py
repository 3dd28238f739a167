"""`show`: what a notebook displays for a sample, a batch, or a dataset."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmstream.display.contents import address_of
from mmstream.display.html import document, page
from mmstream.display.packs import pack_html, pack_text
from mmstream.display.samples import Card, batch_html, cards_html, sample_html, samples_part
from mmstream.display.text import describe
from mmstream.errors import ConfigError
from mmstream.settings import checked
from mmstream.storage.urls import local_path


@dataclass(frozen=True)
class Shown:
    """What `show` returns: HTML in a notebook, text elsewhere.

    Attributes:
        html: one ``<div>`` without scripts or links; images are embedded.
        text: one line per sample or batch.
    """

    html: str
    text: str

    @checked()
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write an HTML page that needs no other file, and opens in any browser.

        Its content security policy forbids all scripts, and forbids the browser to load anything.
        So a page of data from strangers is safe to open.

        Args:
            path: a local file. It is replaced if it exists.

        Returns:
            The path.

        Raises:
            OSError: the file cannot be written.

        Examples:
            >>> dataset = mm.open_dataset("shards/")
            >>> mm.show(dataset[0]).save("sample.html").name
            'sample.html'
        """
        path = Path(local_path(os.fspath(path)))
        title = next(iter(self.text.splitlines()), "mmstream")
        path.write_text(document(title, self.html), encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


@checked()
def show(value: Any, *, tokenizer: Any = None) -> Shown:
    """Return a view of samples, batches or datasets that a notebook displays.

    Videos are shown as some of their frames, decoded ones as the model gets them. Files of sounds
    are shown as a player.

    The output is bounded: long texts are cut, images are thumbnails, and of many rows the first are
    shown. Batches on a device are copied to the host. Datasets read some samples that are spread
    over them, up to 32 MiB.

    Batches of a pipeline with `mm.Flat` or `mm.Pack` are drawn row by row: documents and their
    borders, how many tokens are learned, pictures, positions, padding and free room.

    Args:
        value: a sample (raw or decoded), a list of samples (`Pipeline.take`), a batch (on the host
            or a device), a Dataset or a view of one.
        tokenizer: shows ``input_ids`` as text, with the tokens that the model learns in colour. For
            samples that a `TextDecoder` with this tokenizer has decoded, and for batches without
            padding.

    Returns:
        An object that a notebook displays as HTML. Elsewhere its ``repr`` is text. Its `Shown.save`
        writes a page.

    Raises:
        ConfigError: `value` is none of these, or has no tokens to show.

    Examples:
        >>> dataset = mm.open_dataset("shards/")
        >>> mm.show(dataset[0])
        <sample 000000001: ...>
    """
    if isinstance(value, Mapping) and value.keys() >= {"cu_seq_lens_q", "document_row"}:
        return Shown(pack_html(value, tokenizer), pack_text(value))
    if tokenizer is not None:
        return _show_tokens(value, tokenizer)
    if isinstance(value, Mapping) and isinstance(value.get("__key__"), str):
        return Shown(sample_html(value), describe(value))
    if isinstance(value, Mapping) and isinstance(value.get("__key__"), list):
        return Shown(batch_html(value), describe(value))
    if hasattr(value, "_repr_html_"):
        return Shown(value._repr_html_(), repr(value))
    if isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value):
        return Shown(page(samples_part(value)), "\n".join(describe(item) for item in value))
    raise ConfigError(
        "show: give a sample, a list of samples, a batch or a Dataset, not a "
        f"{type(value).__name__}"
    )


def _show_tokens(value: Any, tokenizer: Any) -> Shown:
    """Show decoded samples whole, with their tokens."""
    samples = [value] if isinstance(value, Mapping) else value
    if not isinstance(samples, Sequence) or not all(
        isinstance(item, Mapping) and isinstance(item.get("__key__"), str) and "input_ids" in item
        for item in samples
    ):
        raise ConfigError(
            "show: tokenizer= goes with decoded samples, such as pipeline.take(8) of a pipeline "
            "with mm.Decode(text=mm.TextDecoder(tokenizer))"
        )
    cards = [Card(address_of(sample), sample) for sample in samples]
    text = "\n".join(describe(sample) for sample in samples)
    return Shown(cards_html("", cards, tokenizer), text)

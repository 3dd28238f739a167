"""Rows that describe a video or recording in pieces: one piece is one sample of an epoch.

Place in the flow: ``Pipeline(before=(mm.one_segment,))`` runs it on raw samples. Decoders with
``span="row"`` then decode that piece only.
"""

from __future__ import annotations

from typing import Any

from mmstream.decoding.sample_rng import sample_rng
from mmstream.errors import DecodeError, SkipSample, escaped
from mmstream.types import Sample
from mmstream.wrong_arguments import checked


@checked(late=True)
def one_segment(sample: Sample) -> Sample:
    """Make a sample of one of its segments, drawn anew in each epoch: for ``Pipeline(before=)``.

    The segments are ``json.segments``, a list of objects: ``{"start_s": 2.5, "end_s": 7, "text": "a
    dog barks"}``. All segments of a sample are equally likely. The draw is that of
    ``mm.sample_rng(sample, "segment")``, so it is the same on every topology and after a resume.

    Args:
        sample: A raw sample with ``json`` parsed. It is not changed.

    Returns:
        A sample in whose ``json`` the keys of the segment take the place of ``segments``:
        ``start_s`` and ``end_s``, which decoders with ``span="row"`` read, and others, such as
        ``messages``. A ``text`` becomes ``txt``, too. A sample without ``segments`` comes back as
        it is.

    Raises:
        SkipSample: The list is empty.
        DecodeError: It is no list of objects.

    Examples:
        >>> decode = mm.Decode(audio=mm.AudioDecoder(span="row"))
        >>> dataset = mm.open_dataset("shards/")
        >>> pipeline = mm.Pipeline(
        ...     dataset, global_batch_size=8, before=(mm.one_segment,), decode=decode
        ... )
    """
    row = sample.get("json")
    if not isinstance(row, dict) or "segments" not in row:
        return sample
    segments = row["segments"]
    if not isinstance(segments, list):
        raise DecodeError(f"json.segments is {_shown(segments)}, not a list")
    if not segments:
        raise SkipSample("json.segments is empty")
    number = int(sample_rng(sample, "segment").integers(len(segments)))
    segment = segments[number]
    if not isinstance(segment, dict):
        raise DecodeError(f"json.segments[{number}] is {_shown(segment)}, not an object")
    others = {name: value for name, value in row.items() if name != "segments"}
    changed = {**sample, "json": {**others, **segment}}
    if isinstance(segment.get("text"), str):
        changed["txt"] = segment["text"]
    return changed


def _shown(value: Any) -> str:
    return escaped(repr(value), 40)

"""What a loader says once about files that its pipeline does not decode."""

from __future__ import annotations

import logging
from collections import Counter

from mmstream.dataset.source import datasets_of
from mmstream.decoding.decode import Decode
from mmstream.decoding.fields import audio_fields, undecoded_media, video_fields
from mmstream.decoding.stored import baked_content
from mmstream.errors import escaped
from mmstream.pipeline import Pipeline

__all__ = ["advise_on_media"]

logger = logging.getLogger(__name__)


def advise_on_media(pipeline: Pipeline) -> None:
    """Log which videos and recordings reach the batches as bytes, though other fields are decoded.

    So do all files of a baked dataset that is not read with `Decode.baked`.

    A pipeline with functions of its own may decode them there.
    """
    decode = pipeline.decode
    if pipeline.before or pipeline.transforms or (decode is not None and decode.is_baked):
        return
    datasets = datasets_of(pipeline.dataset)
    for dataset in datasets:
        if baked_content(dataset) is not None:
            logger.warning(
                "%s: was written by `mmstream bake`, and batches hold the bytes of its files: "
                "decode=mm.Decode.baked() reads them",
                escaped(dataset.store.url),
            )
            return
    if decode is None:
        return
    counts: Counter[str] = Counter()
    for dataset in datasets:
        counts.update(dataset.manifest.fields)
    media = undecoded_media({name: counts[name] for name in _left_alone(counts, decode)})
    if media:
        logger.info(
            "not decoded: %s; batches hold their bytes: decode them by mm.Decode(video=, audio=), "
            "or remove the fields in Pipeline(before=)",
            media,
        )


def _left_alone(names: Counter[str], decode: Decode) -> list[str]:
    """Return the fields of videos and recordings that no decoder takes."""
    videos = [] if decode.video is not None else video_fields(names)
    recordings = [] if decode.audio is not None else audio_fields(names)
    named = decode.plan.named_sources
    return [name for name in (*videos, *recordings) if name not in named]

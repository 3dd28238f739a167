"""What each row of a batch holds of videos, recordings and text, to compare batches by rows."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def media_rows(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return one value per row: its key, whether it is valid, and digests of its media."""
    rows: list[list[Any]] = [[] for _ in batch["__key__"]]
    for name in ("video", "clip.mp4"):
        if name not in batch:
            continue
        counts = batch[f"{name}_frames"].tolist()
        videos = batch[name]
        if isinstance(videos, torch.Tensor):
            videos = torch.split(videos, counts)
        times = torch.split(batch[f"{name}_pts_s"], counts)
        columns = zip(batch[f"{name}_row"].tolist(), videos, times, counts, strict=True)
        for row, video, stamps, count in columns:
            assert len(video) == count
            rows[row].append((name, digest(video), tuple(stamps.tolist())))
    for name, length in (("audio", "audio_length"), ("audio_features", "audio_features_length")):
        if name not in batch:
            continue
        tracks = batch.get("audio_video", torch.full_like(batch["audio_row"], -1)).tolist()
        columns = zip(
            batch["audio_row"].tolist(), batch[name], batch[length].tolist(), tracks, strict=True
        )
        for row, values, count, track in columns:
            owner = -1 if track < 0 else int(batch["video_row"][track])
            assert owner in (-1, row)
            rows[row].append((name, digest(values[..., :count]), count))
            assert name == "audio_features" or not values[..., count:].any()
    if "input_ids" in batch:
        for row, (ids, mask) in enumerate(
            zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ):
            rows[row].append(tuple(ids[mask.bool()].tolist()))
    valid = batch["__valid__"].tolist()
    return [(key, is_valid, *row) for key, is_valid, row in zip(batch["__key__"], valid, rows)]


def digest(values: torch.Tensor) -> str:
    data = values.contiguous().numpy().tobytes()
    return f"{tuple(values.shape)} {values.dtype} {hashlib.sha256(data).hexdigest()[:16]}"

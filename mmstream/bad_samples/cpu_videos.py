"""Counts videos by who has decoded them, with ``VideoDecoder(device="cuda")``, and says so.

Runs in the main process of a rank, beside `limits`. Such samples are good: they never reach a
limit. There is one line in the log for the first of each reason, and a summary at the end of each
epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mmstream.bad_samples.limits import Stats
from mmstream.decoding.video.cpu_videos import CpuVideo

__all__ = ["count_videos", "log_videos"]

logger = logging.getLogger(__name__)


def count_videos(stats: Stats, num_gpu_videos: int, cpu_videos: Sequence[CpuVideo]) -> None:
    """Count the videos of a batch. Log the first of each reason for the CPU.

    Args:
        stats: changed in place.
        num_gpu_videos: videos that the GPU has decoded.
        cpu_videos: videos that the CPU has decoded in its place.
    """
    stats.num_gpu_videos += num_gpu_videos
    for video in cpu_videos:
        stats.cpu_videos[video.reason] += 1
        if stats.cpu_videos[video.reason] == 1:
            logger.warning(
                "%s: decoded on the CPU in place of the GPU: %s; others are only counted, see "
                "loader.stats.cpu_videos",
                video.address,
                video.reason,
            )


def log_videos(stats: Stats, epoch: int) -> None:
    """Log who has decoded the videos since the loader was made, at the end of an epoch."""
    if not stats.cpu_videos:
        return
    reasons = ", ".join(f"{number:,}: {why}" for why, number in stats.cpu_videos.most_common())
    logger.warning(
        "after epoch %d, since the loader was made: the GPU decoded %s videos, and the CPU %s (%s)",
        epoch,
        f"{stats.num_gpu_videos:,}",
        f"{stats.cpu_videos.total():,}",
        reasons,
    )

"""What a loader says once about a run on object storage: two time limits that do not fit."""

from __future__ import annotations

import logging

import torch.distributed

from mmstream.storage.patience import patience_limit_s

__all__ = ["warn_of_patience"]

logger = logging.getLogger(__name__)


def warn_of_patience() -> None:
    """Warn where a rank that waits for storage could end the others by their time-out."""
    timeout_s = _group_timeout_s()
    if timeout_s is not None and patience_limit_s() > timeout_s / 2:
        logger.warning(
            "a rank waits up to %g s for storage, and torch.distributed gives up after %g s: "
            "set MMSTREAM_STORAGE_PATIENCE_S to less than half of that, or raise the time-out of "
            "init_process_group",
            patience_limit_s(),
            timeout_s,
        )


def _group_timeout_s() -> float | None:
    """Return the time-out of the default process group; None: there is none, or it is unknown."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    try:  # torch has no public way to ask for it
        group = torch.distributed.distributed_c10d._get_default_group()
        options = group._get_backend(torch.device("cpu")).options
        return float(options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return None

"""Batches are plain tensors of the CPU, whatever the caller's code has told torch.

`torch.set_default_device` and `torch.inference_mode` are settings of a thread. They would change
batches that the caller's thread makes, and not those of helper threads and worker processes.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Make tensors on the CPU and outside of inference mode, while this context lasts.

    A tensor that is made in inference mode cannot be trained on, also where its memory is used
    again later.
    """
    import torch

    with ExitStack() as settings:
        if torch.is_inference_mode_enabled():
            settings.enter_context(torch.inference_mode(False))
        if torch.get_default_device().type != "cpu":
            settings.enter_context(torch.device("cpu"))
        yield

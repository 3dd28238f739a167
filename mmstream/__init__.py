"""Multimodal training data on plain WebDataset tars.

Every sample is delivered exactly once per epoch, in the same global batches on any number of ranks
and workers. These are the steps, in the order of the data:

    mm.convert        rows and media files -> tar shards, indexes, a manifest
    mm.open_dataset   a dataset with a length and random access
    mm.Pipeline       a description: order -> read -> decode -> batch
    mm.Loader         runs a Pipeline in worker processes; its state is an epoch and a step
    mm.to_device      the last stage: batches on the GPU, one batch ahead

A name is imported when it is first used, so converting and planning do not load torch.
"""

import ast
import os
import sys
from importlib import import_module
from pkgutil import get_data
from typing import Any

__version__ = "0.2.0"

# The stub beside this file lists the public names once, for type checkers and for this module.
_STUB = ast.parse(get_data(__name__, "__init__.pyi") or b"")  # also from a zip
_MODULE_OF = {
    alias.name: node.module or ""
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_MODULE_OF)

if "MMSTREAM_MAIN_PROCESS" in os.environ:  # a worker that imports the main script, which may hang
    import_module("mmstream.processes.workers").follow_while_starting()


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        if reason := import_module("mmstream.settings").instead_of(f"mm.{name}"):
            raise AttributeError(reason)
        module = sys.modules[__name__]  # Python suggests the nearest of its names
        raise AttributeError(f"module 'mmstream' has no attribute {name!r}", name=name, obj=module)
    if _MODULE_OF[name] == __name__:  # a module that is public itself, such as mm.errors
        return import_module(f"{__name__}.{name}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

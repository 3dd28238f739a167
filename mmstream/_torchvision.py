"""The only place that imports torchvision. It works also where ``import torchvision`` fails.

PyPI's torchvision wheel is compiled against a CUDA build of torch. With a CPU build of torch its
compiled code does not load. Its Python code then stops with ``operator torchvision::nms does not
exist``, although transforms and image grids need no compiled code.

The remedy is to declare the operators that the Python code looks for. They get no implementation:
`torchvision.ops.nms` and `torchvision.io` still raise an error when they are called. Where
torchvision loads by itself, nothing is declared.

Importing this module imports neither torch nor torchvision.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_SCHEMAS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

# torch drops the declarations with the library object, so it must live as long as the process.
_declared: list[object] = []


def import_torchvision() -> ModuleType:
    """Import torchvision. Declare the operators that its compiled code failed to provide.

    Call it before the first import of torchvision, and before importing a library that imports
    torchvision itself.

    Returns:
        The module ``torchvision``.

    Raises:
        ImportError: torchvision is not installed.
        RuntimeError: torchvision fails for another reason than missing operators.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    import torch

    # The failed import leaves half initialised submodules behind.
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in _SCHEMAS:
        library.define(name + _SIGNATURE)  # type: ignore[no-untyped-call]
    _declared.append(library)
    return importlib.import_module("torchvision")

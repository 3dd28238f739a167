"""The one door to torchvision, which opens it where a plain ``import torchvision`` fails.

PyPI's torchvision wheel is compiled against a CUDA torch. Beside a CPU build of torch its compiled
part does not load, and its Python part then stops with ``operator torchvision::nms does not
exist``, though transforms and image grids need no compiled part at all. The cure is to declare the
schemas that the Python part looks for. They get no implementation: `torchvision.ops.nms` and
`torchvision.io` still refuse to work, and say so.

Where torchvision loads by itself nothing is declared. Importing this module imports nothing heavy.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

__all__ = ["import_torchvision"]

_SCHEMAS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

# torch forgets the schemas when the library object dies, so it lives as long as the process.
_declared: list[object] = []


def import_torchvision() -> ModuleType:
    """Import torchvision, declaring the operators that its compiled part failed to bring.

    Call it before the first import of torchvision, also of libraries that import torchvision
    themselves.

    Returns:
        The module ``torchvision``.

    Raises:
        ImportError: torchvision is not installed.
        RuntimeError: It fails for another reason than the missing operators.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    import torch

    # The failed import leaves its submodules behind, half initialised.
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in _SCHEMAS:
        library.define(name + _SIGNATURE)  # type: ignore[no-untyped-call]
    _declared.append(library)
    return importlib.import_module("torchvision")

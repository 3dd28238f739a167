"""Keeps the first results of torch on a CPU exact, in a process that computes in threads.

torch computes `exp`, `log`, `sin` and the like with a library, oneMKL. It chooses the code of such
a function in the first call. Versions up to 2024.2 choose wrongly where that call comes from two
threads at once: one of them gets a result with errors of 1e-4, without a word. A mel window that
was computed so and kept would spoil all features of a process. See
https://github.com/pytorch/pytorch/issues/188792.

The remedy is a first call from one thread. Whatever starts threads that compute, or computes what
it keeps, calls `resolve_vector_math` before.

Importing this module does not import torch.
"""

from __future__ import annotations

from functools import cache

_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "sin", "tan", "tanh"),
    *("exp", "expm1", "log", "log10", "log1p", "log2", "sqrt"),
    *("erf", "erfc", "erfinv"),
)
"""Those that torch may compute with oneMKL."""


@cache
def resolve_vector_math() -> None:
    """Let oneMKL choose the code of its functions now. It takes about a millisecond, once."""
    import torch

    for dtype in (torch.float32, torch.float64):
        values = torch.full((1,), 0.5, dtype=dtype)
        for name in _FUNCTIONS:
            getattr(torch, name)(values)

"""The compiled module for JPEGs (mmstream/csrc/), where it is built.

reduced.decode_reduced, planes.decode_planes -> `load_compiled`
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType

__all__ = ["load_compiled"]

logger = logging.getLogger(__name__)


@functools.cache
def load_compiled() -> ModuleType | None:
    """Import the compiled module, once. None where it was not built: then libjpeg does its work."""
    try:
        import mmstream.decoding.image._reduced as compiled
    except ImportError:
        logger.debug("mmstream.decoding.image._reduced is not built: libjpeg decodes all JPEGs")
        return None
    return compiled

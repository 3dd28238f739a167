"""What transformers says of a model: what it is for, and the arguments of its forward pass.

arguments.model_arguments -> `is_classifier`, `is_text_model`, `parameters_of`
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from mmstream._torchvision import import_torchvision

TWO_TOWERS = ("clip", "siglip")
"""Families with a tower for texts and one for pictures."""


def is_text_model(config: Any) -> bool:
    """Tell whether a config is of a language model that takes text only."""
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        return False
    import_torchvision()
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    kind = type(config)  # encoders such as BERT can be asked to decode, and are not made for it
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING and kind not in MODEL_FOR_MASKED_LM_MAPPING


def is_classifier(model: Any, config: Any) -> bool:
    """Tell whether a model is one of image classification."""
    if model is not None:
        base = getattr(model, "get_base_model", None)  # of peft
        kinds: set[Any] = {*type(model).__mro__, *type(base() if callable(base) else model).__mro__}
        return any(
            kind.__name__.endswith("ForImageClassification")
            and "input_ids" not in inspect.signature(kind.forward).parameters
            for kind in kinds
        )
    if hasattr(config, "text_config"):  # it may be meant for the whole model, which reads too
        return False
    import_torchvision()
    from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

    return type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING


@lru_cache(maxsize=32)
def parameters_of(config_type: Any) -> frozenset[str]:
    """Return the arguments of the forward pass in the installed version; empty: not known."""
    import_torchvision()
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )

    for mapping in (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
    ):
        if config_type in mapping:
            return frozenset(inspect.signature(mapping[config_type].forward).parameters)
    return frozenset()

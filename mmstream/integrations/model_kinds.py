"""What transformers says of a model: its config, what it is for, the arguments of its forward pass.

inputs.py, check_packing.py -> `resolve_model`
arguments.model_arguments -> `is_classifier`, `is_text_model`, `parameters_of`
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from mmstream._torchvision import import_torchvision
from mmstream.errors import ConfigError
from mmstream.wrong_arguments import shown

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


def resolve_model(model_or_family: Any) -> tuple[Any, Any]:
    """Return the model (None for a config or a name) and its config.

    Args:
        model_or_family: The model (also in DDP, or compiled), its config, or a ``model_type``.

    Raises:
        ConfigError: It is none of these.
    """
    if isinstance(model_or_family, str):
        import_torchvision()  # transformers imports it too
        from transformers import CONFIG_MAPPING

        try:
            return None, CONFIG_MAPPING[model_or_family]()
        except KeyError:
            raise ConfigError(
                f"model_inputs: {shown(model_or_family)} is not a model_type of transformers, "
                'such as "qwen2_vl"; or give the model itself'
            ) from None
    model = model_or_family
    while not hasattr(model, "config") and not hasattr(model, "model_type"):
        inner = getattr(model, "module", getattr(model, "_orig_mod", None))  # DDP, torch.compile
        if inner is None:
            raise ConfigError(
                f"model_inputs: {type(model).__name__} has no config; give a model of "
                "transformers, its config, or a model_type"
            )
        model = inner
    return (None, model) if hasattr(model, "model_type") else (model, model.config)

"""From what a user gives as a model to the model and its config.

inputs.py, check_packing.py -> `resolve_model`
"""

from __future__ import annotations

from typing import Any

from mmstream._torchvision import import_torchvision
from mmstream.errors import ConfigError
from mmstream.wrong_arguments import shown


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

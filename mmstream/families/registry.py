"""Which family a model, its config, its processor or a ``model_type`` is of.

    `of` -> a `Family`: of this folder, of another package, or by what transformers says of a model

Other packages add families by the entry point ``mmstream.families``, whose name is the
``model_type``. Only the one that is asked for is imported, and those of this folder come first. A
folder with a model never runs code: nothing is imported by what stands in its files.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.metadata import EntryPoint
from typing import Any

from mmstream.errors import ConfigError, escaped
from mmstream.families import (
    clip,
    gemma3,
    idefics,
    internvl,
    llava,
    mistral3,
    qwen_audio,
    qwen_omni,
    qwen_vl,
    whisper,
)
from mmstream.families.classifier import Classifier, is_classifier
from mmstream.families.family import Family, import_torchvision
from mmstream.processes.workers import installed_entry_points
from mmstream.settings import shown

logger = logging.getLogger(__name__)

GROUP = "mmstream.families"
"""The entry points of families of other packages."""

FAMILIES: dict[str, Family] = {
    **llava.FAMILIES,
    **qwen_vl.FAMILIES,
    **qwen_omni.FAMILIES,
    **internvl.FAMILIES,
    **idefics.FAMILIES,
    **gemma3.FAMILIES,
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), qwen_vl.GLM_V),
    **mistral3.FAMILIES,
    **qwen_audio.FAMILIES,
    **whisper.FAMILIES,
    **clip.FAMILIES,
}
"""The families of this folder, by ``model_type``."""

_TYPES_OF_PROCESSORS = {
    "qwen2_5_omni": "qwen2_5_omni_thinker",
    "qwen3_omni_moe": "qwen3_omni_moe_thinker",
    "pixtral": "mistral3",
}
"""The ``model_type`` that is trained with a processor, where its folder has another name.

Of the omni models, the part that sees, hears and reads is trained by itself.
"""


def of(model: Any) -> Family:
    """Return the family of a model: what mmstream knows of it.

    Args:
        model: A model of transformers (also in DDP, or compiled), its config, its processor, or a
            ``model_type``.

    Raises:
        ConfigError: The family is not known. Or its package does not work; the message names the
            package and its version.

    Examples:
        >>> mm.families.of("qwen3_vl").takes
        ('image', 'video')
    """
    model_type = model if isinstance(model, str) else _type_of_processor(model)
    family = None if model_type is None else family_of_type(model_type)
    return resolve(model)[2] if family is None else family


def _type_of_processor(processor: Any) -> str | None:
    """Return the ``model_type`` of a processor, by where its class is: in the folder of its models.

    None: it is not a processor of transformers.
    """
    package, models, folder, *_ = [*type(processor).__module__.split("."), "", ""]
    is_model = hasattr(processor, "config") or hasattr(processor, "model_type")
    if is_model or (package, models) != ("transformers", "models"):
        return None
    return _TYPES_OF_PROCESSORS.get(folder, folder)


def resolve(model: Any) -> tuple[Any, Any, Family]:
    """Return the model (None for a config or a name), its config, and its family.

    Args:
        model: The model (also in DDP, or compiled), its config, or a ``model_type``, which stands
            for the default config of transformers.

    Raises:
        ConfigError: It is none of these, or the family is not known.
    """
    inner, config = model_and_config(model)
    if inner is not None and is_classifier(inner):
        return inner, config, Classifier()
    family = family_of_type(str(config.model_type)) or _by_transformers(inner, config)
    if family is None:
        raise unknown(config.model_type)
    return inner, config, family


def model_and_config(model: Any) -> tuple[Any, Any]:
    """Return the model (None for a config or a name) and its config.

    Raises:
        ConfigError: It is none of these.
    """
    if isinstance(model, str):
        import_torchvision()  # transformers imports it too
        from transformers import CONFIG_MAPPING

        try:
            return None, CONFIG_MAPPING[model]()
        except KeyError:
            raise ConfigError(
                f"model_inputs: {shown(model)} is not a model_type of transformers, "
                'such as "qwen2_vl"; or give the model itself'
            ) from None
    while not hasattr(model, "config") and not hasattr(model, "model_type"):
        inner = getattr(model, "module", getattr(model, "_orig_mod", None))  # DDP, torch.compile
        if inner is None:
            raise ConfigError(
                f"model_inputs: {type(model).__name__} has no config; give a model of "
                "transformers, its config, or a model_type"
            )
        model = inner
    return (None, model) if hasattr(model, "model_type") else (model, model.config)


def _by_transformers(model: Any, config: Any) -> Family | None:
    """Return the family by the lists of transformers: a classifier, or a model of text only."""
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        return None
    import_torchvision()
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
    )

    kind = type(config)
    reads = model is not None or hasattr(config, "text_config")  # or its whole model may
    if not reads and kind in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return Classifier()
    # Encoders such as BERT can be asked to decode, and are not made for it.
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING or kind in MODEL_FOR_MASKED_LM_MAPPING:
        return None
    return qwen_vl.Mrope() if qwen_vl.needs_mrope(config) else Family()


def unknown(model_type: str) -> ConfigError:
    """Return the error of a family that is not known."""
    return ConfigError(
        f"model_inputs: {shown(model_type)} is not one of {', '.join(FAMILIES)}, nor a model of "
        "text ForCausalLM, nor one ForImageClassification, and no installed package adds it by the "
        f"entry point {GROUP}; compute its inputs from the batch yourself"
    )


# -- families by their model_type ------------------------------------------------------------------


@lru_cache(maxsize=256)
def family_of_type(model_type: str) -> Family | None:
    """Return the family of a ``model_type``, of this folder or of another package; else None.

    Raises:
        ConfigError: The other package does not work.
    """
    entry = _entry_points().get(model_type)
    if entry is None or model_type not in FAMILIES:
        return FAMILIES.get(model_type) if entry is None else _load(entry)
    logger.warning(
        "families: %s adds %s, which mmstream knows itself: that of mmstream is used",
        package_of(entry),
        model_type,
    )
    return FAMILIES[model_type]


def package_of(entry: EntryPoint) -> str:
    """Return the package of a family and its version, such as "toy 1.2"."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else str(entry.value)


def origin_of(model_type: str) -> str | None:
    """Return the package of a family that is not one of this folder, and its version."""
    entry = None if model_type in FAMILIES else _entry_points().get(model_type)
    return None if entry is None else package_of(entry)


def settings_of_families(decode: Any) -> list[Any]:
    """Return the settings of decoders that a family makes: its functions and rules of tiles."""
    text, image = getattr(decode, "text", None), getattr(decode, "image", None)
    lengths = ("image_length", "video_length", "audio_length")
    functions = [getattr(text, name, None) for name in lengths]
    return [*functions, getattr(image, "tiles", None)]


def versions_of(*settings: Any) -> dict[str, str]:
    """Return the versions of the packages with families that made these settings.

    Args:
        settings: Functions and objects in the settings of decoders. The package of each is that of
            its module. Nothing is imported.
    """
    functions = [getattr(setting, "func", setting) for setting in settings]  # of partial()
    modules = {str(getattr(function, "__module__", "")).split(".")[0] for function in functions}
    return {
        entry.dist.name: entry.dist.version
        for entry in _entry_points().values()
        if entry.dist and entry.module.split(".")[0] in modules
    }


@lru_cache(maxsize=1)
def _entry_points() -> dict[str, EntryPoint]:
    """Return the families of installed packages, by ``model_type``."""
    return {entry.name: entry for entry in installed_entry_points(GROUP)}


def _load(entry: EntryPoint) -> Family:
    """Import the family of another package, and check that it has what it says that it takes."""
    begin = f"families: {entry.name} of {package_of(entry)}"
    try:
        family = entry.load()
    except Exception as error:
        raise ConfigError(
            f"{begin} cannot be imported: {type(error).__name__}: {escaped(error)}: "
            f"update or uninstall the package"
        ) from error
    if not isinstance(family, Family):
        raise ConfigError(
            f"{begin} is a {type(family).__name__}: {entry.value} must be an instance of "
            "mmstream.families.Family"
        )
    needed = [f"{kind}_inputs" for kind in family.takes]
    for name in ["row_inputs"] if family.takes_one_a_row else needed:
        if getattr(type(family), name, None) in (None, getattr(Family, name, None)):
            raise ConfigError(f"{begin} takes {', '.join(family.takes)}, and has no {name}()")
    return family

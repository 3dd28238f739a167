"""What ranks import late that train a small VLM; beside `rank_imports`."""

from mmstream.families.family import import_torchvision
from mmstream.train import loop, models

import_torchvision()
from transformers import (  # noqa: E402
    CLIPVisionModel,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
)

__all__ = ["CLIPVisionModel", "LlamaForCausalLM", "LlavaForConditionalGeneration", "loop", "models"]

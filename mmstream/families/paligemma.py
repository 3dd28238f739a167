"""PaliGemma: a prefix, whose tokens and pictures see each other, and a suffix, which is learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmstream.errors import ConfigError
from mmstream.families.family import Inputs
from mmstream.families.llava import Llava
from mmstream.types import IGNORED_LABEL

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PaliGemma(Llava):
    """[num_pictures, 3, S, S], and which tokens are of the suffix."""

    def text_inputs(self, text: Inputs, config: Any) -> Inputs:
        """Return 0 for tokens of the prefix, which see all of it, and 1 from the first label on.

        So a later question does not see the answers before their time. For example, with labels
        only where answers stand:

            labels          -100 -100 5 6 -100 -100 7
            token_type_ids     0    0 1 1    1    1 1
        """
        labels = text.get("labels")
        if labels is None:  # for inference: all is prefix
            return {"token_type_ids": text["input_ids"] * 0}
        kinds = (labels != IGNORED_LABEL).long().cummax(1).values
        return {"token_type_ids": kinds * text.get("attention_mask", 1)}

    def flat_positions(
        self, text: Inputs, media_inputs: Inputs, model: Any, config: Any, *, sees: bool
    ) -> Tensor:
        """Refuse flat batches: the model lets the prefixes of all documents see each other."""
        raise ConfigError(
            "model_inputs: paligemma lets the prefixes of a row see each other: leave batching= "
            "out, so that each row is one document"
        )


FAMILIES: dict[str, PaliGemma] = {"paligemma": PaliGemma()}

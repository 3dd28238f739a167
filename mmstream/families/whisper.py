"""Whisper: speech to text. A row has one recording, and its text is what is learned."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mmstream.errors import ConfigError
from mmstream.families.family import Family, Features, Inputs, Medium, require_one_each
from mmstream.types import Batch

if TYPE_CHECKING:
    from mmstream.decoding.audio import WhisperFeatures as WhisperFeatures
else:

    def __getattr__(name: str) -> Any:
        if name != "WhisperFeatures":  # its module imports torch
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module("mmstream.decoding.audio").WhisperFeatures


@dataclass(frozen=True)
class Whisper(Family):
    """A recording a row, and its text shifted by one token."""

    takes: tuple[str, ...] = ("audio",)
    takes_one_a_row: bool = True

    def row_inputs(
        self, batch: Batch, media: dict[str, Medium], config: Any, label_field: str
    ) -> Inputs:
        """Return the features and the text.

        The decoder's input begins with the config's ``decoder_start_token_id``, and each token of
        it predicts the next one. A text that begins with this token does not get it twice. For
        example, with the start token 9 and a text of [5, 6, 7]:

            decoder_input_ids   9 5 6
            labels              5 6 7

        A batch without labels has none here: its ids would teach the padding too.

        Raises:
            ConfigError: A row has no recording, or several. Or the text is padded on the left.
        """
        import torch

        features = media.get("audio")
        counts = [0] * len(batch["input_ids"])
        for row in features.rows.tolist() if isinstance(features, Features) else ():
            counts[row] += 1
        require_one_each(batch, counts, "whisper", "audio")
        assert isinstance(features, Features)  # each row has one
        ids, labels = batch["input_ids"], batch.get("labels")
        if "attention_mask" in batch and not bool(batch["attention_mask"][:, 0].all()):
            raise ConfigError(
                "model_inputs: whisper takes texts padded on the right: "
                'tokenizer.padding_side="right"'
            )
        start = int(config.decoder_start_token_id)
        if bool((ids[:, 0] == start).all()):
            ids, labels = ids[:, 1:], None if labels is None else labels[:, 1:]
        first = torch.full_like(ids[:, :1], start)
        inputs = {
            "input_features": features.values,
            "decoder_input_ids": torch.cat((first, ids[:, :-1]), dim=1),
        }
        return inputs if labels is None else inputs | {"labels": labels}


FAMILIES: dict[str, Family] = {"whisper": Whisper()}

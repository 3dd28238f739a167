"""Whisper for the training loop: recordings and their transcripts.

    models.open_model -> `load_speech`, `speech_decode`

The loss is a sum over the tokens of the transcripts, so it can be cut into micro-batches and ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmstream.batching.valid import summed_loss, valid_labels
from mmstream.decoding.audio.decoder import AudioDecoder
from mmstream.decoding.decode import Decode
from mmstream.decoding.text.decoder import TextDecoder
from mmstream.train.inputs import model_inputs
from mmstream.train.tokenizer import load_pretrained, read_json
from mmstream.types import IGNORED_LABEL, Batch


class SpeechModel(nn.Module):
    """A speech model whose forward pass returns the summed loss of the transcripts' tokens.

    Args:
        speech: a `transformers` WhisperForConditionalGeneration.

    Attributes:
        separable: True. The loss of a batch is the sum of the losses of its rows.
    """

    separable = True
    takes = "one recording (wav, flac, mp3, ...) and its transcript a sample"

    def __init__(self, speech: Any) -> None:
        super().__init__()
        self.speech = speech

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (loss_sum, weight): the summed loss and its number of tokens, float32 scalars.

        Args:
            batch: the features of one recording a row, and the tokens of its transcript.

        Raises:
            ConfigError: a row has no recording, or several.
        """
        inputs = model_inputs(batch, self.speech)
        labels = inputs["labels"]
        logits = self.speech(**inputs, use_cache=False).logits
        return summed_loss(logits, labels), self.weight_of(batch)

    def weight_of(self, batch: Batch) -> Tensor:
        """Return the number of tokens in the loss of a batch, a float32 scalar.

        A start token at the front of a transcript does not count: the decoder is given it.
        """
        counts = valid_labels(batch) != IGNORED_LABEL
        is_start = batch["input_ids"] == self.speech.config.decoder_start_token_id
        counts[:, 0] &= ~is_start[:, 0]
        weight: Tensor = counts.sum().float()
        return weight


def load_speech(folder: str) -> SpeechModel:
    """Return the Whisper that is saved in a local folder, in float32. No code in it is run.

    Raises:
        ConfigError: there is no such model.
    """
    speech = load_pretrained(
        "WhisperForConditionalGeneration", folder, f"{folder}: no Whisper model", dtype="float32"
    )
    return SpeechModel(speech.train())


def speech_decode(tokenizer: Any, folder: str, max_length: int) -> Decode:
    """Return the decoders that make the fields that a `SpeechModel` reads.

    Args:
        tokenizer: the tokenizer of the model.
        folder: the folder of the model. Its feature extractor says how long recordings are, and
            how many mel bins they have.
        max_length: longest transcript in tokens. The model's own limit, where that is less.

    Raises:
        ConfigError: the folder has no feature extractor.
    """
    extractor = load_pretrained(
        "AutoFeatureExtractor", folder, f"{folder}: no feature extractor of a speech model"
    )
    positions = read_json(Path(folder, "config.json")).get("max_target_positions")
    most = positions if isinstance(positions, int) else max_length
    text = TextDecoder(tokenizer, max_length=min(max_length, most))
    return Decode(audio=AudioDecoder.from_processor(extractor), text=text)

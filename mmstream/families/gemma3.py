"""Gemma 3 and PaliGemma: pictures of one size, whose tokens see each other.

Pan and scan of Gemma 3 adds crops of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from mmstream.decoding.image.geometry import ImageShape, PanAndScanTiles as PanAndScanTiles
from mmstream.decoding.media_shapes import MediaText
from mmstream.decoding.text.placeholders import ImageLength
from mmstream.errors import ConfigError
from mmstream.families.family import Blank, Family, Inputs, Medium, Tensor, TokenCount
from mmstream.families.llava import Llava
from mmstream.settings import PositiveInt, checked
from mmstream.types import IGNORED_LABEL


@checked()
def image_length(
    tokens_per_image: PositiveInt = 256,
    *,
    image_token: str = "<image_soft_token>",
    image_start_token: str = "<start_of_image>",
    image_end_token: str = "<end_of_image>",
) -> ImageLength:
    """Write the tokens of a picture for Gemma 3: its marks, and words between it and its crops.

    The rule is that of transformers' ``Gemma3Processor.replace_image_token``. The chat template of
    the models writes the start token alone. So let it write the image token instead:
    ``tokenizer.chat_template.replace("<start_of_image>", "<image_soft_token>")``.

    Args:
        tokens_per_image: Tokens of a picture and of each crop, ``mm_tokens_per_image`` of the
            model's config.
        image_token: The ``image_token`` of the text decoder.
        image_start_token: What stands before the tokens of a picture.
        image_end_token: What stands after them.

    Returns:
        A function for ``TextDecoder(image_length=)``. Use it with
        ``ImageDecoder.from_processor(processor)``.

    Examples:
        >>> text = image_length()(ImageShape(896, 896, picture=(480, 640)))
        >>> text.text.strip(), text.lengths
        ('<start_of_image><image_soft_token><end_of_image>', (256,))
        >>> image_length()(ImageShape(896, 896, picture=(300, 900), num_tiles=4)).lengths
        (256, 256, 256, 256)
    """
    marked = f"\n\n{image_start_token}{image_token}{image_end_token}\n\n"
    return partial(_written, length=tokens_per_image, marked=marked)


def _written(shape: ImageShape, length: int, marked: str) -> MediaText:
    lengths = (length,) * shape.num_tiles
    if shape.num_tiles == 1:
        return MediaText(marked, lengths)
    crops = " ".join([marked] * (shape.num_tiles - 1))
    words = "and here are some crops to help you see better"
    return MediaText(f"Here is the original image {marked} {words} {crops}", lengths)


@dataclass(frozen=True)
class Gemma3(Llava):
    """[num_pictures, 3, S, S], and which tokens are of pictures: those of one see each other."""

    def inputs(self, media: dict[str, Medium], ids: Tensor, config: Any) -> Inputs:
        """Return the pictures, and the kinds of tokens: 1 for pictures, 0 for text."""
        inputs = super().inputs(media, ids, config)
        return {**inputs, "token_type_ids": (ids == config.image_token_id).long()} if media else {}

    def num_tokens(self, kind: str, medium: Any, config: Any) -> TokenCount | None:
        """Return the tokens of all pictures and crops, of which each takes the same number."""
        length = config.mm_tokens_per_image
        setting = f"mm.families.gemma3.image_length({length})"
        return TokenCount(len(medium.tiles) * length, setting)

    def flat_positions(
        self, text: Inputs, media_inputs: Inputs, model: Any, config: Any, *, sees: bool
    ) -> Tensor:
        """Return the positions of a flat batch of texts.

        Raises:
            ConfigError: It has pictures. In layers with a sliding window, transformers 5.23 looks
                for the tokens that see each other at a token's place in its document, not in the
                row. So text would see text after it, and pictures would not see themselves.
        """
        if sees:
            raise ConfigError(
                "model_inputs: in flat batches with pictures, gemma3 of transformers lets wrong "
                "tokens see each other: leave batching= out, so that each row is one document"
            )
        return super().flat_positions(text, media_inputs, model, config, sees=sees)

    def blank(self, kind: str, config: Any) -> Blank | None:
        """Return a picture of the tower's size."""
        side = config.vision_config.image_size
        return Blank.picture(config, config.mm_tokens_per_image, side, side)


@dataclass(frozen=True)
class PaliGemma(Llava):
    """[num_pictures, 3, S, S], and which tokens are of the suffix, which is learned.

    The tokens of the prefix before it and the pictures see each other.
    """

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


FAMILIES: dict[str, Family] = {"gemma3": Gemma3(), "paligemma": PaliGemma()}

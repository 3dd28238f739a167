"""A tokenizer that needs no download: one token a byte, the same everywhere.

It makes the demonstration run on any machine and any language; a real run names a tokenizer folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from mmstream.errors import ConfigError

__all__ = ["byte_tokenizer", "image_token_of", "open_tokenizer"]

IMAGE_TOKENS = ("<image>", "<|image_pad|>", "<image_soft_token>", "<IMG_CONTEXT>")
"""What an image is written as: Llava and most others, Qwen-VL, Gemma 3, InternVL."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, an image where it stands."""


def byte_tokenizer(*, chat: bool = False) -> Any:
    """Return a `transformers` fast tokenizer of 256 bytes and <pad>, <bos>, <eos>.

    Ids 0-255 are the bytes, in the order of GPT-2's printable stand-ins for them, 256 <pad>, 257
    <bos>, 258 <eos>. A text becomes <bos> bytes <eos>, also when it is truncated.

    Args:
        chat: Add <image>, <|im_start|> and <|im_end|>, ids 259-261, and a chat template; without
            it there is none.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # Sorted, because the library hands the alphabet over in a hash's order.
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<bos>", "<eos>"]
    turns = ["<|im_start|>", "<|im_end|>"]
    if chat:
        names += ["<image>", *turns]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",
        special_tokens=[("<bos>", vocab["<bos>"]), ("<eos>", vocab["<eos>"])],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE if chat else None,
    )
    if chat:
        fast.add_special_tokens({"additional_special_tokens": ["<image>", *turns]})
    return fast


def open_tokenizer(folder: str | None, *, chat: bool = False) -> Any:
    """Return the tokenizer saved in a local folder, or the byte tokenizer for None.

    Code in the folder is never run, and nothing is downloaded.

    Args:
        folder: As `save_pretrained` writes it, also a whole model's.
        chat: Whether conversations are to be read: the byte tokenizer with its chat template; a
            folder's template also from ``chat_template.json``, where older processors keep it.

    Raises:
        ConfigError: it is no such folder; or `chat`, and it has no chat template.
    """
    if folder is None:
        return byte_tokenizer(chat=chat)
    if not Path(folder).is_dir():
        raise ConfigError(f"tokenizer: {folder} is no folder; save one with save_pretrained")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"tokenizer: {folder} holds none: {reason}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat and not tokenizer.chat_template:
        tokenizer.chat_template = _template_of_processor(Path(folder))
    return tokenizer


def image_token_of(tokenizer: Any) -> str:
    """Return the token that stands for an image in this tokenizer's chats.

    Raises:
        ConfigError: It names none, and has none of the usual ones.
    """
    named = getattr(tokenizer, "image_token", None)
    if named:
        return str(named)
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    for token in IMAGE_TOKENS:
        if token in added:
            return token
    raise ConfigError(f"the tokenizer has no image token: none of {', '.join(IMAGE_TOKENS)}")


def _template_of_processor(folder: Path) -> str:
    jinja, json = folder / "chat_template.jinja", folder / "chat_template.json"
    if jinja.is_file():
        return jinja.read_text("utf-8")
    if json.is_file():
        return str(msgspec.json.decode(json.read_bytes())["chat_template"])
    raise ConfigError(f"{folder}: the tokenizer has no chat template")

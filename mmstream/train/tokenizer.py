"""The tokenizer of a run: from a folder, or one token per byte, which needs no download.

    models.open_model_tokenizer -> `open_tokenizer`

The byte tokenizer lets the small models run on any machine and with any language. A real run names
the folder of a tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from mmstream.errors import ConfigError, escaped
from mmstream.families.family import import_torchvision

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, with an image token at the position of each image."""


def byte_tokenizer(*, chat: bool = False) -> Any:
    """Return a `transformers` fast tokenizer with one token per byte of UTF-8.

    Ids 0 to 255 are the bytes, in the order of the printable characters by which GPT-2 writes them.
    256 is <pad>, 257 <bos> and 258 <eos>. A text becomes <bos>, its bytes and <eos>, also when it
    is truncated.

    Args:
        chat: add <image>, <|im_start|> and <|im_end|>, ids 259 to 261, and a chat template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # Sorted, because the library returns the alphabet in the order of a hash table.
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<bos>", "<eos>"]
    turn_tokens = ["<|im_start|>", "<|im_end|>"]
    if chat:
        tokens += ["<image>", *turn_tokens]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
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
        fast.add_special_tokens({"additional_special_tokens": ["<image>", *turn_tokens]})
    return fast


def open_tokenizer(folder: str | None, *, chat: bool = False) -> Any:
    """Return the tokenizer that is saved in a local folder, or the byte tokenizer.

    Nothing is downloaded, and no code in the folder is run.

    Args:
        folder: the folder of a tokenizer or a whole model, as `save_pretrained` writes it. None:
            the byte tokenizer.
        chat: the tokenizer needs a chat template. It is also read from ``chat_template.json``,
            where older processors keep it.

    Raises:
        ConfigError: the folder has no tokenizer; or, with `chat`, no chat template.
    """
    if folder is None:
        return byte_tokenizer(chat=chat)
    if not Path(folder).is_dir():
        raise ConfigError(f"tokenizer: {folder} is not a folder; save one with save_pretrained")
    tokenizer = load_pretrained("AutoTokenizer", folder, f"tokenizer: {folder} has no tokenizer")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat and not tokenizer.chat_template:
        template_file = Path(folder, "chat_template.json")
        if not template_file.is_file():
            raise ConfigError(f"{folder}: the tokenizer has no chat template")
        tokenizer.chat_template = str(read_json(template_file).get("chat_template", ""))
    return tokenizer


# -- folders of transformers -----------------------------------------------------------------------
#
# The folder may come from a stranger. `transformers` raises nearly any error for a damaged one, and
# some of its messages tell the reader to run the folder's code. Here every error is one line.


def load_pretrained(kind: str, folder: str, message: str, **settings: Any) -> Any:
    """Return what ``from_pretrained`` of a class of `transformers` returns. Nothing is downloaded.

    Args:
        kind: The name of the class.
        folder: The folder, as `save_pretrained` writes it.
        message: The error's message without its reason: "FOLDER has no tokenizer".
        settings: Further arguments of `from_pretrained`.

    Raises:
        ConfigError: The folder cannot be opened, or only by running code in it.
    """
    if kind != "AutoTokenizer":
        import_torchvision()  # transformers imports it too
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,  # other weights are pickles; a tokenizer has none
            **settings,
        )
    except Exception as error:
        raise ConfigError(f"{message}: {_reason(folder, error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file of a folder.

    Raises:
        ConfigError: It is not a JSON object, or cannot be read.
    """
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {escaped(error.strerror)}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {escaped(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return content


def image_settings(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """Return the settings of a folder's image processor and their file; None: it has none.

    transformers 5 writes those of all processors into one file, older versions one file for each.

    Raises:
        ConfigError: The file cannot be read.
    """
    whole = folder / "processor_config.json"
    if whole.exists():
        settings = read_json(whole).get("image_processor")
        if isinstance(settings, dict):
            return whole, settings
    alone = folder / "preprocessor_config.json"
    return (alone, read_json(alone)) if alone.exists() else (None, {})


def _reason(folder: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text or "custom code" in text:
        return (
            "it needs code of its own, and code of a folder is never run; take one that "
            "transformers itself knows"
        )
    if "safetensors" in text and any(Path(folder).glob("*.bin")):
        return "its weights are a pickle, which is never opened; save them as safetensors"
    return f"{type(error).__name__}: {escaped(text)}"

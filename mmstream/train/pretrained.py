"""Open what `save_pretrained` wrote to a folder: models and tokenizers. No code of it is run.

    tokenizer.open_tokenizer, clip.load_clip, vlm.load_vlm -> `load_pretrained`

The folder may come from a stranger. `transformers` raises nearly any error for a damaged one, and
some of its messages tell the reader to run the folder's code. Here every error is one line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from mmstream.errors import ConfigError, escaped


def load_pretrained(kind: Any, folder: str, message: str, **settings: Any) -> Any:
    """Return ``kind.from_pretrained(folder)``. Nothing is downloaded.

    Args:
        kind: A class of `transformers`.
        folder: The folder, as `save_pretrained` writes it.
        message: The error's message without its reason: "FOLDER has no tokenizer".
        settings: Further arguments of `from_pretrained`.

    Raises:
        ConfigError: The folder cannot be opened, or only by running code of its own.
    """
    try:
        with _progress_bars_on_terminals_only():
            return kind.from_pretrained(
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
        ConfigError: It is no JSON object, or cannot be read.
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


@contextmanager
def _progress_bars_on_terminals_only() -> Iterator[None]:
    """Keep the bars of transformers out of log files, where each rank would write one."""
    from transformers.utils import logging

    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


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

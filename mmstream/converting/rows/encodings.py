"""Texts that are not UTF-8: what they may be, and the same text in UTF-8.

    a plain file -> ENCODINGS, where the caller names one -> detect

A guess is advice for a message. No file is read by a guess.
"""

from __future__ import annotations

import codecs
import logging
import shutil
from pathlib import Path

from mmstream.errors import ConfigError, escaped
from mmstream.wrong_arguments import shown

logger = logging.getLogger(__name__)

_BLOCK = 1 << 20
_MIN_SHARE = 0.1
"""So many of the characters must be frequent ones. In a text of another encoding, few are."""
_HIRAGANA = "".join(map(chr, range(0x3041, 0x3094)))
_FREQUENT = {
    "gb18030": "的一是不了在人有我他这中大来上国个到说们为子和你地出也时年得就要下以会图片什么",
    "big5": "的一是不了在人有我他這中大來上國個到說們為子和你地出也時年得就要下以會圖片什麼",
    "shift_jis": _HIRAGANA,
    "euc_jp": _HIRAGANA,
    "euc_kr": "이다는을의가에고하지한도로기사아리자어서은를나시그있인들만",
}


def encoding_name(name: str) -> str:
    """Return Python's name of an encoding of texts.

    Raises:
        ConfigError: There is none of this name.
    """
    try:
        "a".encode(name)  # encodings of bytes, such as base64, refuse it
        return codecs.lookup(name).name
    except (LookupError, ValueError, TypeError):
        raise ConfigError(
            f"encoding={shown(name)}: is no encoding of texts that Python knows, such as "
            "'gb18030', 'big5', 'shift_jis', 'utf-16' or 'cp1252'"
        ) from None


def write_utf8(path: Path, target: Path, encoding: str, rows: str) -> Path:
    """Write a text to a new file in UTF-8. Return the file.

    Bytes that the encoding does not have become bytes that are not UTF-8: their row is a reject.

    Raises:
        ConfigError: The text is of another encoding altogether.
    """
    errors = "surrogatepass" if encoding.startswith(("utf-16", "utf-32")) else "surrogateescape"
    try:
        with (
            path.open(encoding=encoding, errors=errors, newline="") as source,
            target.open("x", encoding="utf-8", errors="surrogatepass", newline="") as file,
        ):
            shutil.copyfileobj(source, file, _BLOCK)
    except UnicodeError as error:
        raise ConfigError(f"{rows}: is not {encoding} ({escaped(error)})") from None
    return target


def warn_of_encoding(head: bytes, rows: str, encoding: str | None) -> None:
    """Log it if the beginning of a text is not UTF-8, with what it may be.

    Args:
        head: The beginning.
        rows: How messages name the file.
        encoding: What the text was before it was written in UTF-8. None: the caller named none.
    """
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        cure = "" if encoding else f"; {advice(head)}"
        name = encoding or "UTF-8"
        logger.warning("%s: not %s; rows with such bytes are rejected%s", rows, name, cure)


def advice(text: bytes) -> str:
    """Return what to say to a conversion about a text that is not UTF-8."""
    guess = _guess(text)
    named = f"it may be {guess}: say encoding={guess!r}"
    return "name its encoding with encoding=NAME" if guess is None else named


def _guess(text: bytes) -> str | None:
    """Return the encoding that a text seems to have, or None."""
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    shares = {name: _share(text, name, frequent) for name, frequent in _FREQUENT.items()}
    best = max(shares, key=shares.__getitem__)
    if shares[best] >= _MIN_SHARE:
        return best
    num_high = sum(byte > 127 for byte in text)
    return "cp1252" if num_high * 4 < len(text) else None


def _share(text: bytes, encoding: str, frequent: str) -> float:
    """Return which part of a text's characters is frequent. 0: it has not this encoding."""
    try:
        characters = codecs.getincrementaldecoder(encoding)().decode(text)
    except UnicodeDecodeError:
        return 0
    num_others = sum(not character.isascii() for character in characters)
    return sum(character in frequent for character in characters) / max(1, num_others)

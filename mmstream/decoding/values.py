"""The built-in decoders of small fields: what an extension means where a `Decode` has ``...``.

Place in the flow: `Decode` asks here once, when it is made. Shards may come from strangers, so
nothing here unpickles, and no size that a file states is believed before its bytes are counted.

    cls, cls2, class, count, index, inx, id      -> int
    txt, text, transcript                        -> str
    json, jsn                                    -> what `parse_json` makes of it
    npy, npz                                     -> numpy array, dict of arrays; no pickles
    jpg, png and the other pictures              -> ImageDecoder(), the picture's own size
"""

from __future__ import annotations

import io
import math
import re
import zipfile
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.errors import ConfigError, DecodeError, escaped
from mmstream.media.fields import decode_text, parse_json
from mmstream.media.types import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from mmstream.settings import refuse_broken

JSON_EXTENSIONS = frozenset({"json", "jsn"})

MAX_ARRAY_BYTES = 256 * 2**20
"""Most bytes of an array, and of all arrays of an npz together, once unpacked."""

MAX_NPZ_ARRAYS = 1000
"""Most arrays of an npz."""

MAX_HEADER_BYTES = 10_000
"""Longest header of an npy file. numpy evaluates it as a literal."""

_INTEGER = re.compile(rb"\s*([+-]?[0-9]{1,19})\s*")

_PICKLED = "it holds pickled objects, and unpickling runs code of whoever wrote the shard"

_REFUSED = {
    **dict.fromkeys(("pkl", "pickle", "pyd"), _PICKLED),
    **dict.fromkeys(("pth", "pt"), f"torch.load is needed: {_PICKLED}"),
    **dict.fromkeys(("ten", "tb"), "the tensor format of webdataset has no check of its sizes"),
    **dict.fromkeys(("mp", "msg", "cbor"), "no decoder for it is built in"),
    **dict.fromkeys(("gz", "bz2", "xz", "zst"), "a small file may unpack to any size"),
}


def built_in(name: str, max_json_bytes: int) -> Any:
    """Return the built-in decoder of a field, by its extension.

    Args:
        name: The field's name, such as "jpg" or "mask.png".
        max_json_bytes: The limit of JSON.

    Returns:
        A function from bytes to a value, or an `ImageDecoder`.

    Raises:
        ConfigError: There is none for this extension; the message says why.
    """
    extension = name.rpartition(".")[2]
    if extension in JSON_EXTENSIONS:
        return partial(parse_json, max_bytes=max_json_bytes)
    if extension in IMAGE_EXTENSIONS:
        return ImageDecoder()
    if extension in _DECODERS:
        return _DECODERS[extension]
    begin = f"Decode: {name!r} has no built-in decoder"
    advice = f"pass a function from bytes to a value instead, {{{name!r}: function}}"
    refuse_broken(
        (extension in _REFUSED, f"{begin}: {_REFUSED.get(extension)}; {advice}"),
        (
            extension in VIDEO_EXTENSIONS,
            f"{begin}: say which frames, {{{name!r}: mm.VideoDecoder(num_frames=8)}}; or {advice}",
        ),
        (
            extension in AUDIO_EXTENSIONS,
            f"{begin}: say at which rate, {{{name!r}: mm.AudioDecoder(sample_rate=16_000)}}; or "
            f"{advice}",
        ),
    )
    extensions = ", ".join(sorted({*_DECODERS, *JSON_EXTENSIONS}))
    raise ConfigError(f"{begin}; those of {extensions} and of pictures are built in; {advice}")


def decode_integer(data: bytes) -> int:
    """Decode a whole number in decimal digits, with white space around it.

    Raises:
        DecodeError: It is something else, or does not fit into 64 bits.
    """
    match = _INTEGER.fullmatch(data)
    number = int(match[1]) if match else None
    if number is None or not -(1 << 63) <= number < 1 << 63:
        raise DecodeError(f"not a whole number: {escaped(data[:40])}")
    return number


def decode_npy(data: bytes) -> NDArray[Any]:
    """Decode an npy file without pickles.

    Returns:
        A writable array in the byte order of this machine.

    Raises:
        DecodeError: It is not an npy file of version 1 or 2, holds Python objects, or has more or
            fewer bytes than its header says.
    """
    array = npy_view(data)
    if array.nbytes > MAX_ARRAY_BYTES:
        raise DecodeError(f"npy: {array.nbytes:,} bytes, the limit is {MAX_ARRAY_BYTES:,}")
    return array.astype(array.dtype.newbyteorder("="))


def npy_view(data: bytes | memoryview) -> NDArray[Any]:
    """Return the array of an npy file as a view of its bytes, which cannot be written to.

    Raises:
        DecodeError: As `decode_npy`, except that no size is too large: nothing is copied.
    """
    # Files of equal arrays begin alike, and reading a header takes longer than all the rest.
    dtype, shape, is_fortran, start = _npy_header(bytes(data[: _header_end(data)]))
    num_items = math.prod(shape)
    if num_items * dtype.itemsize != len(data) - start:
        raise DecodeError(
            f"npy: {escaped(dtype)} {escaped(shape, 60)} needs {num_items * dtype.itemsize:,} "
            f"bytes, and the file has {len(data) - start:,}"
        )
    try:
        flat = np.frombuffer(data, dtype, num_items, start) if num_items else np.empty(0, dtype)
        return flat.reshape(shape, order="F" if is_fortran else "C")
    except (ValueError, OverflowError) as error:  # too many dimensions, or one beyond 64 bits
        raise DecodeError(f"npy: {escaped(error)}") from None


def _header_end(data: bytes | memoryview) -> int:
    """Return where the header of an npy file ends, at most."""
    start = 10 if data[6:7] == b"\1" else 12
    return start + min(int.from_bytes(data[8:start], "little"), MAX_HEADER_BYTES)


@lru_cache(512)
def _npy_header(data: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    """Return type, shape, whether columns come first, and where the values begin."""
    file = io.BytesIO(data)
    try:
        is_second = npy_format.read_magic(file) == (2, 0)  # the next version is for named columns
        read = npy_format.read_array_header_2_0 if is_second else npy_format.read_array_header_1_0
        try:
            shape, is_fortran, dtype = read(file, max_header_size=MAX_HEADER_BYTES)
        except SystemError:  # Python 3.11 miscounts its own depth where threads take turns
            return _npy_header(data)
    except Exception as error:  # numpy evaluates the header as a literal, which raises anything
        raise DecodeError(f"npy: {escaped(' '.join(str(error).split()))}") from None
    if dtype.hasobject or dtype.kind not in "biufcSU" or not dtype.itemsize:
        raise DecodeError(f"npy: type {escaped(dtype)}; only numbers and strings are decoded")
    if not all(type(side) is int and side >= 0 for side in shape):
        raise DecodeError(f"npy: shape {escaped(shape, 60)}")
    return dtype, shape, is_fortran, file.tell()


def decode_npz(data: bytes) -> dict[str, NDArray[Any]]:
    """Decode an npz file without pickles.

    Returns:
        The arrays by name.

    Raises:
        DecodeError: It is not an npz file, one of its arrays is damaged, or they exceed a limit.
    """
    if data.count(b"PK\x01\x02") > MAX_NPZ_ARRAYS:  # before a list of them is made
        raise DecodeError(f"npz: more than {MAX_NPZ_ARRAYS:,} arrays")
    arrays = {}
    num_bytes = 0
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.infolist():
                num_bytes += member.file_size
                _check_unpacked(num_bytes)
                with archive.open(member) as file:  # no more than the archive says is unpacked
                    content = file.read(member.file_size + 1)
                arrays[member.filename.removesuffix(".npy")] = decode_npy(content)
    except DecodeError:
        raise
    except Exception as error:  # zipfile raises BadZipFile, zlib.error, NotImplementedError, ...
        raise DecodeError(f"npz: {escaped(' '.join(str(error).split()))}") from None
    return arrays


def _check_unpacked(num_bytes: int) -> None:
    if num_bytes > MAX_ARRAY_BYTES:
        raise DecodeError(f"npz: {num_bytes:,} bytes unpacked, the limit is {MAX_ARRAY_BYTES:,}")


ARRAY_DECODERS: dict[str, Callable[[bytes], Any]] = {"npy": decode_npy, "npz": decode_npz}

_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), decode_integer),
    **dict.fromkeys(("txt", "text", "transcript"), decode_text),
    **ARRAY_DECODERS,
}

"""Decoded samples as files of a tar, and back: what ``mmstream bake`` writes and `Decode` reads.

Place in the flow: `encode_sample` is the last step of a bake. `StoredFields` is its inverse; a
`Decode` of a baked dataset runs it in the place of decoders. `CollateSettings` says how batches are
made of either.

A value becomes the file that WebDataset's users expect, so that their decoders read it too:

    array, tensor       latent.npy
    tensor [.., C, H, W] whose channels lie together in memory
                        image.hwc.npy, with the axes [.., H, W, C]
    tensor of bfloat16  latent.bfloat16.npy, its bits as uint16
    list of these       image.0.npy, image.1.npy
    dict of arrays      NAME.npz
    str, int            caption.txt, label.cls
    numpy scalar of another type than Python's numbers have
                        score.npy
    other plain values  NAME.json
    bytes               as they are

A field that has the extension keeps its name: ``txt`` is stored as ``txt``. What each file was is
in the manifest (`StoredFile`). A sample that the pipeline refused has one file, `REFUSED_FIELD`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from mmstream.dataset.dataset import Dataset, ShardSource, datasets_of
from mmstream.decoding.text.placeholders import LOSS_FIELD, TextLoss
from mmstream.decoding.values import decode_integer, decode_npz, npy_view
from mmstream.errors import (
    ConfigError,
    DecodeError,
    ManifestError,
    escaped,
)
from mmstream.media.fields import addressed, decode_text, parse_json, with_address
from mmstream.tar.lazy_bytes import LazyBytes
from mmstream.tar.samples import is_reserved, split_name
from mmstream.types import Sample

Kind = Literal[
    "bytes", "text", "integer", "json", "array", "number", "arrays", "tensor", "pixels", "loss"
]

LOSS_FILE = "text_loss.json"
"""The file of a `TextLoss`."""

CONTENT_VERSION = 1

MAX_VALUE_BYTES = 64 << 20
"""Most bytes of a text or of JSON."""

MAX_LOSS_CHARACTERS = 2000

_BITS: dict[torch.dtype, np.dtype[Any]] = {
    torch.bfloat16: np.dtype("<u2"),
    torch.float8_e4m3fn: np.dtype("u1"),
    torch.float8_e5m2: np.dtype("u1"),
}
"""Types of tensors that numpy does not have, and what their bits are stored as."""

_BIT_TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _BITS}

_TENSOR_TYPES = _BIT_TYPES | {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
"""Types of tensors by name. But for those of `_BITS`, numpy has them under the same name."""

_PYTHON_TYPES = ("bool", "int64", "float64")
"""Types of numpy's scalars that a batch makes of Python's numbers, too."""

_NUMBERS = "biufcSU"
"""Kinds of numpy types that are stored: those that `decode_npy` takes."""


# -- what batches depend on beside the values of samples -------------------------------------------
#
# `Decode.collate_settings` says it of the decoders, and batches are made by it. A bake writes it to
# the manifest, so that batches of the baked dataset are the same.

MAX_SIDE = 1 << 48

Side = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIDE)]
"""Of an array."""

TokenId = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]

MAX_PADDED_LENGTH = 1 << 22

PaddedLength = Annotated[int, msgspec.Meta(ge=1, le=MAX_PADDED_LENGTH)]
"""Tokens of a row. A manifest may come from a stranger, and each batch takes the memory."""


EmptyAudio: TypeAlias = tuple[tuple[Side, ...], Literal["int16", "float32"]]
"""Shape and type of a field in a batch without a recording."""


class CollateSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What batches depend on beside the values of samples: settings of the pipeline's decoders."""

    pad_token_id: TokenId | None = None
    """None: the pipeline had no text decoder."""
    pad_to: PaddedLength | None = None
    padding_side: Literal["left", "right"] = "right"
    counted_media: tuple[str, ...] = ("audio", "image", "video")
    picture_names: tuple[str, ...] = ()
    """Fields of pictures with colours, which a model wants normalized."""
    list_fields: tuple[str, ...] = ()
    picture_fields: tuple[str, ...] = ()
    video_fields: dict[str, tuple[Side, ...] | None] = {}
    """Shape of each field in a batch without a video; None where it is a list."""
    audio_fields: dict[str, EmptyAudio] = {}

    def __post_init__(self) -> None:
        recordings = (shape for shape, _ in self.audio_fields.values())
        for shape in (*self.video_fields.values(), *recordings):
            if shape is not None and (0 not in shape[:1] or math.prod(shape[1:]) > MAX_SIDE):
                raise ValueError(f"a field without media has the shape {shape}")


# -- files and manifest ----------------------------------------------------------------------------


class StoredFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a file of a baked sample is. Its name says it alone, for all samples of a dataset."""

    field: str
    """The field of the sample that it holds."""
    kind: Kind
    item: int | None = None
    """Its position, where the field is a list of arrays."""
    dtype: str | None = None
    """Type of its numbers, as of torch or numpy. None: it differs, or there are none."""
    shape: tuple[Side, ...] | None = None
    """Of its numbers, as stored. None: it differs from sample to sample."""
    num_samples: int = 0
    """Samples that have the file."""
    num_bytes: int = 0
    """Of all of them."""

    def joined(self, name: str, other: StoredFile) -> StoredFile:
        """Return what is known of the files of this name in two groups of samples.

        Raises:
            ConfigError: They are not the same.
        """
        if (self.field, self.kind, self.item) != (other.field, other.kind, other.item):
            raise ConfigError(
                f"{escaped(name)}: holds {_described(self)} in one sample and {_described(other)} "
                "in another; give one of them another name, or make them alike"
            )
        return StoredFile(
            self.field,
            self.kind,
            self.item,
            self.dtype if self.dtype == other.dtype else None,
            self.shape if self.shape == other.shape else None,
            self.num_samples + other.num_samples,
            self.num_bytes + other.num_bytes,
        )


class BakedContent(msgspec.Struct, frozen=True, omit_defaults=True):
    """``source.bake`` in the manifest of a baked dataset."""

    fingerprint: str
    """Of what made it: ``mmstream.bake.json`` has the settings."""
    source_bytes: int
    """Size of the shards that it was made of. The order is that of the source, so its defaults are
    computed from this."""
    num_bad: int
    """Samples that the pipeline refused."""
    num_left_out: int
    """Those of them that a filter left out."""
    files: dict[str, StoredFile]
    collate: CollateSettings = CollateSettings()
    version: int = CONTENT_VERSION


def baked_content(dataset: Dataset) -> BakedContent | None:
    """Return what the manifest of a dataset says about its bake. None: it was not baked.

    Raises:
        ManifestError: It is malformed, or of a newer version.
    """
    content = dataset.manifest.source.get("bake")
    if content is None:
        return None
    url = dataset.store.url
    version = content.get("version", CONTENT_VERSION) if isinstance(content, dict) else None
    if version != CONTENT_VERSION:
        raise ManifestError(
            f"{url}: baked in version {escaped(version)}, this mmstream reads {CONTENT_VERSION}; "
            "install a newer mmstream"
        )
    try:
        return msgspec.convert(content, BakedContent)
    except msgspec.ValidationError as error:
        raise ManifestError(
            f"{url}: its manifest has no files of a bake: {escaped(error)}"
        ) from None


_Encoded: TypeAlias = tuple[str, bytes, StoredFile]
"""A file of a sample: its name, its content, and what it is."""


def encode_sample(sample: Sample) -> dict[str, tuple[bytes, StoredFile]]:
    """Return the files of a decoded sample: {name: (bytes, what it is)}, in the order of fields.

    Fields named like ``__x__`` are left out, as batches leave them out.

    Raises:
        ConfigError: A value cannot be stored, or a name cannot be that of a file.
    """
    files: dict[str, tuple[bytes, StoredFile]] = {}
    for name, value in sample.items():
        if name == LOSS_FIELD:
            encoded = [_json(LOSS_FILE, name, list(value), "loss")]
        elif name.startswith("__"):
            continue
        else:
            encoded = _encoded(name, value)
        for file_name, data, file in encoded:
            if split_name(f"k.{file_name}") != ("k", file_name) or is_reserved(file_name):
                raise ConfigError(
                    f"field {escaped(repr(name))}: no file of a tar can have this name; use lower "
                    "case, and no slash"
                )
            if file_name in files:
                raise ConfigError(
                    f"field {escaped(repr(name))}: would be stored as {escaped(file_name)}, as "
                    "something else is; give it another name"
                )
            files[file_name] = data, file
    if not files:
        raise ConfigError("the sample has no fields, and a tar holds none without a file")
    return files


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the numbers of a tensor of any type, in the order of its axes."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in _BITS:
        tensor = tensor.view(getattr(torch, f"int{8 * tensor.element_size()}"))
    return tensor.numpy().tobytes()


def _encoded(name: str, value: Any) -> list[_Encoded]:
    """Return the files of a field."""
    if isinstance(value, bytes | bytearray | memoryview):
        return [_file(name, bytes(value), name, "bytes")]
    if isinstance(value, np.generic):
        if value.dtype.kind in "biufc" and value.dtype.name not in _PYTHON_TYPES:
            return [_array(name, value)]  # a batch keeps its type
        value = value.item()
    if _is_array(value):
        return [_array(name, value)]
    if isinstance(value, list | tuple) and value and all(map(_is_array, value)):
        return [_array(name, item, number) for number, item in enumerate(value)]
    if isinstance(value, dict) and value and all(map(_is_array, value.values())):
        return [_file(_named(name, "npz"), _npz(name, value), name, "arrays")]
    if type(value) is str:
        return [_file(_named(name, "txt"), _utf8(name, value), name, "text")]
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        return [_file(_named(name, "cls"), str(value).encode(), name, "integer")]
    return [_json(_named(name, "json"), name, value, "json")]


def _is_array(value: Any) -> bool:
    return type(value) in (np.ndarray, torch.Tensor)  # others would come back as these


def _named(name: str, extension: str) -> str:
    """Return the name of a field with an extension, which it may have already."""
    return name if name.rpartition(".")[2] == extension else f"{name}.{extension}"


def _file(file_name: str, data: bytes, field: str, kind: Kind, **details: Any) -> _Encoded:
    file = StoredFile(field, kind, num_samples=1, num_bytes=len(data), **details)
    return file_name, data, file


def _json(file_name: str, field: str, value: Any, kind: Kind) -> _Encoded:
    try:
        data = msgspec.json.encode(value)
        is_same = msgspec.json.decode(data) == value and _is_plain(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        is_same = False
    if not is_same:
        raise _cannot_store(field, value)
    return _file(file_name, data, field, kind)


def _is_plain(value: Any) -> bool:
    """Tell whether a value has no tuple, enumeration or the like in it, which JSON would change."""
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    if type(value) is list:
        return all(map(_is_plain, value))
    return type(value) in (str, int, float, bool, type(None))


def _utf8(field: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise _cannot_store(field, text) from None


def _cannot_store(field: str, value: Any) -> ConfigError:
    return ConfigError(
        f"field {escaped(repr(field))}: a {type(value).__name__} with this content cannot be "
        "stored: make it an array, a tensor, text, bytes, a number, or a list or dict of plain "
        "values without NaN and tuples"
    )


def _array(field: str, value: Any, item: int | None = None) -> _Encoded:
    """Return the file of an array or a tensor."""
    name = field if item is None else f"{field}.{item}"
    kind: Kind = "number" if isinstance(value, np.generic) else "array"
    if isinstance(value, torch.Tensor):
        value, name, kind, dtype = _of_tensor(field, value, name)
    else:
        value = np.asarray(value)
        dtype = str(value.dtype)
    if value.dtype.kind not in _NUMBERS or not value.dtype.itemsize:
        raise _cannot_store(field, value)
    data = _npy_header(value.dtype.str, value.shape) + value.tobytes()
    return _file(
        _named(name, "npy"), data, field, kind, item=item, dtype=dtype, shape=tuple(value.shape)
    )


def _of_tensor(field: str, tensor: torch.Tensor, name: str) -> tuple[NDArray[Any], str, Kind, str]:
    """Return the numbers of a tensor, the name of its file without extension, its kind and type."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise _cannot_store(field, tensor)
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    kind: Kind = "tensor"
    if tensor.ndim >= 3 and not tensor.is_contiguous():
        channels_last = tensor.movedim(-3, -1)
        if channels_last.is_contiguous():
            tensor, kind = channels_last, "pixels"
            name = name.removesuffix(".npy") + ".hwc"
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype in _BITS:
        name = f"{name.removesuffix('.npy')}.{dtype}"
        bits = getattr(torch, f"int{8 * tensor.element_size()}")
        return tensor.contiguous().view(bits).numpy().view(_BITS[tensor.dtype]), name, kind, dtype
    return tensor.numpy(), name, kind, dtype


@lru_cache(512)
def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    npy_format.write_array_header_1_0(file, header)
    return file.getvalue()


def _npz(field: str, arrays: Mapping[Any, Any]) -> bytes:
    """Return an archive of arrays. Equal ones give equal bytes: numpy writes no time into it."""
    for name, value in arrays.items():
        is_array = isinstance(name, str) and isinstance(value, np.ndarray)
        if not is_array or value.dtype.kind not in _NUMBERS:
            raise _cannot_store(field, arrays)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


class StoredFields:
    """The fields of a baked dataset. Decodes a sample of it.

    Args:
        content: What the manifest says.
        num_samples: Samples of the dataset.
        num_bytes: Size of its shards.
        views: Arrays are views of what was read. Nobody may write to them.

    Attributes:
        content: What the manifest says.
        shapes: Bytes of each field that is one tensor of one shape in all good samples, as a shape:
            ``(num_bytes,)``. It is decoded into the memory of its batch.
        parsers: Of ``json``, for functions before decoding.
    """

    def __init__(
        self, content: BakedContent, num_samples: int, num_bytes: int, *, views: bool = False
    ) -> None:
        self.content = content
        self._sizes = num_samples, num_bytes
        self._views = views
        # A manifest may come from a stranger: no more memory is taken than its shards have bytes.
        self.shapes = {
            file.field: (row_bytes,)
            for file in content.files.values()
            if file.num_samples == num_samples - content.num_bad
            and 0 < (row_bytes := _row_bytes(file)) * max(1, num_samples) <= num_bytes
        }
        decoders = _DECODERS | ({"array": npy_view} if views else {})
        self._decoders = {
            name: decoders.get(file.kind) or partial(_decode_tensor, file)
            for name, file in content.files.items()
        }
        is_json = "json" in content.files and content.files["json"].kind == "json"
        self.parsers = {"json": self._decoders["json"]} if is_json else {}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(StoredFields, views=self._views), (self.content, *self._sizes)

    @classmethod
    def of_source(cls, source: ShardSource, *, views: bool = False) -> StoredFields:
        """Return the fields of a baked dataset, or of a mixture of such.

        Args:
            source: The dataset.
            views: As for a call of the class.

        Raises:
            ConfigError: A dataset was not baked, or two of a mixture differ.
            ManifestError: A manifest is malformed.
        """
        datasets = datasets_of(source)
        contents = []
        for dataset in datasets:
            content = baked_content(dataset)
            if content is None:
                raise ConfigError(
                    f"{dataset.store.url}: was not made by `mmstream bake`: give decode= the "
                    "decoders of its fields, mm.Decode(image=..., text=...)"
                    + "; in a mixture, bake all sources or none"
                    * (len(datasets) > 1)
                )
            contents.append(content)
        if not contents:
            raise ConfigError("decode=mm.Decode.baked(): the dataset has no shards")
        num_bytes = sum(dataset.manifest.num_bytes for dataset in datasets)
        num_stored = sum(int(dataset.counts.sum()) for dataset in datasets)
        return cls(_joined(contents), num_stored, num_bytes, views=views)

    def takes_view(self, name: str) -> bool:
        """Tell whether a file may be a view of what was read: its numbers are copied from there."""
        file = self.content.files.get(name)
        return file is not None and file.kind in ("tensor", "pixels")

    def decode(self, sample: Sample, out: Mapping[str, Sequence[torch.Tensor]]) -> Sample:
        """Return a sample as the pipeline made it that was baked; see `decode_all`.

        Args:
            sample: As read from a shard.
            out: Memory of the batch by field, one uint8 [num_bytes] of `shapes`.
        """
        memory = {field: row.unsqueeze(0) for field, (row,) in out.items()}
        return self.decode_all([sample], memory)[0]

    def decode_all(
        self, samples: Sequence[Sample], memory: Mapping[str, torch.Tensor]
    ) -> list[Sample]:
        """Return samples as the pipeline made them that was baked.

        Tensors lie in `memory`, or in memory of their own. So do arrays, unless they are views.

        Args:
            samples: As read from shards. There are B.
            memory: Of the batch by field, uint8 [B, num_bytes] of `shapes`.

        Raises:
            DecodeError: A file is damaged.
        """
        # Field by field: a large copy leaves the caches cold, and Python is slow then.
        columns = {
            name: _copied(file, [sample.get(name) for sample in samples], memory[file.field])
            for name, file in self.content.files.items()
            if file.item is None and file.field in memory
        }
        return [
            self._decode(sample, {name: rows[number] for name, rows in columns.items()})
            for number, sample in enumerate(samples)
        ]

    def _decode(self, sample: Sample, copied: Mapping[str, torch.Tensor | None]) -> Sample:
        """Return a sample with its files decoded, but for those that were copied."""
        decoded: Sample = {}
        lists: dict[str, list[Any]] = {}
        for name, value in sample.items():
            file = self.content.files.get(name)
            if file is None:
                decoded[name] = value
                continue
            result: Any = copied.get(name)
            if result is None:
                result = bytes(value) if isinstance(value, LazyBytes) else value
                if isinstance(result, bytes | memoryview):  # else of a function before decoding
                    result = with_address(sample, name, self._decoders[name], result)
            if file.item is None:
                decoded[file.field] = result
            elif file.item == len(lists.setdefault(file.field, [])):
                lists[file.field].append(result)
                decoded[file.field] = lists[file.field]
            else:
                raise addressed(sample, name, DecodeError("an item before this one is missing"))
        return decoded


def _joined(contents: Sequence[BakedContent]) -> BakedContent:
    """Return what several baked datasets are together."""
    first, *others = contents
    files = dict(first.files)
    num_bad = first.num_bad
    for content in others:
        if content.collate != first.collate:
            raise ConfigError(
                "decode=mm.Decode.baked(): the sources of the mixture were baked with other "
                "decoders, whose batches differ; bake them with one pipeline"
            )
        num_bad += content.num_bad
        for name, file in content.files.items():
            files[name] = files[name].joined(name, file) if name in files else file
    return msgspec.structs.replace(first, files=files, num_bad=num_bad)


def _described(file: StoredFile) -> str:
    kinds = {"array": "an array", "tensor": "a tensor", "bytes": "bytes", "arrays": "arrays"}
    item = "" if file.item is None else f"item {file.item} of "
    return f"{item}{escaped(file.field)}, {kinds.get(file.kind, file.kind)}"


def _row_bytes(file: StoredFile) -> int:
    """Return the bytes of a tensor that has one shape in all samples; 0 for all other files."""
    dtype = _TENSOR_TYPES.get(file.dtype or "")
    if file.kind not in ("tensor", "pixels") or file.item is not None or file.shape is None:
        return 0
    return 0 if dtype is None else math.prod(file.shape) * dtype.itemsize


def _decode_loss(data: bytes) -> TextLoss:
    try:
        reason, is_cut, num_dropped = msgspec.json.decode(data, type=tuple[str, bool, int])
    except msgspec.MsgspecError as error:
        raise DecodeError(f"JSON: {escaped(error)}") from None
    return TextLoss(escaped(reason, MAX_LOSS_CHARACTERS), is_cut, num_dropped)


def _decode_tensor(file: StoredFile, data: bytes | memoryview) -> torch.Tensor:
    array = npy_view(data)
    if array.dtype.kind not in "biufc" or not array.dtype.isnative or array.dtype.itemsize > 16:
        raise DecodeError(f"npy: type {escaped(array.dtype)}, which no tensor has")
    tensor = torch.from_numpy(array.copy())
    dtype = _BIT_TYPES.get(file.dtype or "")
    if dtype is not None:
        if array.dtype != _BITS[dtype]:
            raise DecodeError(f"npy: type {escaped(array.dtype)}, which is not {file.dtype}")
        tensor = tensor.view(dtype)
    return tensor.movedim(-1, -3) if file.kind == "pixels" and tensor.ndim >= 3 else tensor


def _copied(
    file: StoredFile, values: Sequence[Any], rows: torch.Tensor
) -> list[torch.Tensor | None]:
    """Copy the tensors of a field into its rows of a batch: one copy from what was read.

    Args:
        file: What they are. All of them should have its shape.
        values: The files, as read. B of them.
        rows: Memory for them, uint8 [B, num_bytes].

    Returns:
        The tensors. None where a file is another one, and is decoded on its own.
    """
    assert file.shape is not None
    assert file.dtype is not None
    dtype = _TENSOR_TYPES[file.dtype]
    number_type = _BITS.get(dtype) or np.dtype(file.dtype)
    numbers = rows.numpy().view(number_type).reshape(len(values), *file.shape)
    tensor = rows.view(dtype).view(numbers.shape)
    if file.kind == "pixels" and len(file.shape) >= 3:
        tensor = tensor.movedim(-1, -3)
    copied: list[torch.Tensor | None] = list(tensor.unbind())
    for number, value in enumerate(values):
        try:
            array = npy_view(value)
        except (DecodeError, TypeError):  # damaged, or no file of bytes
            copied[number] = None
            continue
        if array.shape == file.shape and array.dtype == number_type:
            numbers[number] = array
        else:
            copied[number] = None
    return copied


_DECODERS: dict[Kind, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "text": partial(decode_text, max_bytes=MAX_VALUE_BYTES),
    "integer": decode_integer,
    "json": partial(parse_json, max_bytes=MAX_VALUE_BYTES),
    "loss": _decode_loss,
    "array": lambda data: npy_view(data).copy(),
    "number": lambda data: npy_view(data)[()],  # the only entry of an array without axes
    "arrays": decode_npz,
}
"""By kind. Tensors need to know their `StoredFile`, too."""

"""300 odd values, texts and columns, as strangers' rows hold them. The same ones at each call."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import json
import pathlib
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

NUM_VALUES = 300
METHODS = ("__str__", "__repr__", "__len__", "__eq__", "__bool__", "__iter__", "__float__")


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("an error without a text")


def odd(base: type, *names: str, error: type[Exception] = NoTextError) -> Any:
    """Return a subclass whose methods raise."""

    def raising(*_: object, **__: object) -> Any:
        raise error("odd")

    return type(f"Odd{base.__name__}", (base,), dict.fromkeys(names, raising))


def nested(depth: int) -> Any:
    """Return lists and dicts in each other."""
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def odd_values() -> list[Any]:
    """Return values of Python. Some of them are of classes whose methods raise."""
    released, loop = memoryview(b"abc"), []
    released.release()
    loop.append({"again": loop})
    texts = [
        *("", " ", "\0", "a\0b", "\ud83d", "\udcff", "\ufeff", "\u202e", "a\nb", "x" * 70_000),
        *("[", "{", "[NaN]", '{"a": 1', "nan", "007", "<image>", "[[", "=1+1", "-" * 500),
    ]
    numbers = [
        *(True, 0, -0.0, float("nan"), float("inf"), 1e308, 5e-324, 2**53 + 1, 2**63, 2**64),
        *(-(2**63) - 1, 10**400, 10**5000, 1 + 2j, fractions.Fraction(1, 3)),
        *map(decimal.Decimal, ("1.5", "NaN", "sNaN", "Infinity", "1e400")),
    ]
    others = [
        *(b"", b"\0", b"\xff\xfe", bytearray(b"x"), memoryview(b"xy")[::-1], released),
        *(datetime.date.min, datetime.datetime.max, datetime.timedelta.max, datetime.time(1)),
        *(datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), uuid.UUID(int=5), NoTextError()),
        *(None, {1, 2}, frozenset(), range(3), (i for i in "ab"), len, object(), int, json, ...),
        *(loop, *map(nested, (150, 201, 5000)), pathlib.Path("a/b"), SimpleNamespace(a=1)),
        *(enum.Enum("Color", {"RED": "red"}).RED, enum.StrEnum("Word", ["A"]).A),
    ]
    kinds = ("f2", "f4", "i1", "u8", "?", "S3", "U3", "c8", "M8[ns]", "m8[s]", "V2", "O", "g")
    arrays = [
        *(np.zeros(shape, kind) for kind in kinds for shape in ((), (2,))),
        *(np.float32("nan"), np.int64(5), np.str_("a"), np.datetime64("NaT"), np.zeros((0, 3))),
        *(np.zeros(2, [("a", "i4"), ("b", "S2")]), np.ma.masked_array([1, 2], [0, 1])),
    ]
    of_classes = [
        *(odd(str, *METHODS)("a"), odd(int, "__int__", "__index__", "__lt__", "__le__")(5)),
        *(odd(float, "__float__")(1.5), odd(bytes, "__bytes__")(b"a"), odd(list, *METHODS)([1])),
        *(odd(dict, name, error=KeyError)(a=1) for name in ("keys", "items", "__iter__")),
        *(odd(tuple, "__iter__")((1,)), odd(pathlib.PurePosixPath, "__fspath__")("a")),
        *(odd(object, *METHODS, error=error)() for error in (MemoryError, RecursionError)),
        *(
            odd(object, *METHODS)(),
            odd(set, *METHODS)(),
            odd(dict, "items", error=AttributeError)(),
        ),
    ]
    keys = [5, "", "a/b", "__x__", None, b"a", (1,), "\ud83d", "..", ".", "a\0", "x" * 9000]
    simple = [*texts, *numbers, *others, *arrays, *of_classes, *({key: 1} for key in keys)]
    turns = [{"messages": [{"role": "user", "content": value}]} for value in simple]
    return [*simple, *turns, *([value, {"a": value}] for value in simple)][:NUM_VALUES]


def odd_rows() -> Iterator[Any]:
    """Yield a good row, then a row with or of each value in turn."""
    for number, value in enumerate(odd_values()):
        rows = ({"text": value}, value, {"text": "with", "more": value}, {"image": value})
        yield {"id": f"good {number}", "text": "fine"}
        yield rows[number % 4]


def odd_lines() -> list[bytes]:
    """Return lines of JSON, or of nearly that. None of them has a line end."""
    raw = [
        *(b"\xef\xbb\xbf{}", b"\0", b'{"text": "\xff"}', b'{"\xff": 1}', b"[" * 5000, b"{" * 5000),
        *(b'{"text": "a", "text": "b"}', b'{"text": 1e999}', b'{"text": ' + b"9" * 5000 + b"}"),
        *(b'{"text": "\\u0000"}', b'{"text": "\\ud83d"}', b'{"text": "a"} {}', b'{"a": "\x01"}'),
    ]
    values = [json.dumps({"text": v}, default=lambda v: str(type(v))) for v in _plain_values()]
    whole = [text.encode() for text in values]
    return (raw + whole + [line[: len(line) // 2] for line in whole if len(line) < 999])[
        :NUM_VALUES
    ]


def _plain_values() -> Iterator[Any]:
    for value in odd_values():
        if type(value) in (str, int, float, bool, type(None)) and value not in (10**400, 10**5000):
            yield from (value, [value], {"a": value}, {str(value)[:99]: 1}, [[], value, {}])


def odd_tables() -> Iterator[pa.Table]:
    """Yield tables of a column of an odd type, 300 rows in all; a text is beside each value."""
    buffers = pa.array([b"\xff", b"ok", b"a\xc3"], pa.binary()).buffers()
    bad = pa.Array.from_buffers(pa.string(), 3, buffers)
    far = pa.array([2**62, 0, -(2**62)], pa.int64())
    words, lists = pa.array(["a", None, "b" * 40]), [["a", "b"], None, ["c", "d"]]
    views, text = (pa.string_view(), pa.binary_view()), pa.string()
    columns = [
        *map(words.cast, (*views, pa.large_string(), pa.large_binary())),
        *(far.view(pa.timestamp(unit)) for unit in ("s", "ms", "us", "ns")),
        *map(far.view, (pa.date64(), pa.duration("s"), pa.time64("ns"))),
        *(pa.array(lists, make(text)) for make in (pa.large_list, pa.list_view)),
        *(pa.array(lists, pa.large_list_view(text)), pa.array(lists, pa.list_(text, 2))),
        *(pa.array(lists, pa.list_(views[0])), pa.array(lists, pa.list_(bad[:0].type))),
        pa.array(lists, pa.list_(pa.dictionary(pa.int8(), text))),
        *(bad, words.dictionary_encode(), pa.nulls(3), pa.array([[], None, [None]])),
        pa.array([2**30, 0, None], pa.int32()).view(pa.date32()),
        pa.array([decimal.Decimal(5), None, decimal.Decimal(-7)], pa.decimal256(50, 5)),
        pa.array([[(1, "v")], None, []], pa.map_(pa.int32(), text)),
        pa.array([[("k", 1), ("k", 2)], None, []], pa.map_(text, pa.int8())),
        *(
            pa.array([0.5, None, 1], pa.float16()),
            pa.array([b"0" * 16, None, b"1" * 16], pa.uuid()),
        ),
        pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), bad),
        *(pa.StructArray.from_arrays([bad, far], names) for names in (["a", "b"], ["a", "a"])),
    ]
    for number in range(NUM_VALUES // 3):
        texts = pa.array([f"row {number}.{i}" for i in range(3)])
        yield pa.table({"text": texts, "odd": columns[number % len(columns)]})

"""Columns of a sidecar, compared with those that pyarrow makes of the same values."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmstream.converting import arrow_columns
from mmstream.converting.arrow_columns import arrow_column
from mmstream.converting.sidecar import SCHEMA

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = {
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.one_of(st.floats(allow_nan=False), st.integers(-9, 9)),
    pa.string(): TEXTS,
    pa.binary(16): st.binary(min_size=16, max_size=16),
    pa.binary(32): st.binary(min_size=32, max_size=32),
}


def values_of(kind):
    if pa.types.is_list(kind):
        return st.lists(values_of(kind.value_type), max_size=3)
    if pa.types.is_struct(kind):
        required = {f.name: values_of(f.type) for f in kind if not f.nullable}
        others = {f.name: st.none() | values_of(f.type) for f in kind if f.nullable}
        return st.fixed_dictionaries(required, optional=others)
    return VALUES[kind]


@given(st.data())
def test_a_column_of_a_sidecar_is_the_one_that_pyarrow_makes(data):
    field = data.draw(st.sampled_from(list(SCHEMA)))
    value = values_of(field.type)
    values = data.draw(st.lists(st.none() | value if field.nullable else value, max_size=20))
    column = arrow_column(tuple(values), field.type)
    column.validate(full=True)
    assert column.equals(pa.array(values, field.type))
    assert column.null_count == values.count(None)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1.5, pa.int32()),
        (2**31, pa.int32()),
        ("1", pa.int64()),
        ("1", pa.float64()),
        (1, pa.string()),
        (b"a", pa.string()),
        ("\ud800", pa.string()),
        (bytes(15), pa.binary(16)),
        ([bytes(17)], pa.list_(pa.binary(16))),
        ({"a": "1"}, pa.struct([("a", pa.int32())])),
    ],
)
def test_a_value_that_does_not_fit_its_column_is_an_error(value, kind):
    good = {pa.int32(): 1, pa.int64(): 1, pa.float64(): 1.0, pa.string(): "a"}.get(kind)
    with pytest.raises((TypeError, ValueError, OverflowError, AttributeError)):
        arrow_column([good, value, None], kind)


def test_two_pieces_of_a_wrong_length_do_not_pass_as_two_of_the_right_one():
    with pytest.raises(ValueError, match="not all values have 16 bytes"):
        arrow_column([bytes(15), bytes(17)], pa.binary(16))


def test_more_bytes_than_offsets_can_say_are_an_error(monkeypatch):
    monkeypatch.setattr(arrow_columns.np, "fromiter", lambda *_: [2**31 - 1, 1])
    with pytest.raises(OverflowError, match="2147483648 bytes or items in 2 values"):
        arrow_column(["a", "b"], pa.string())


def test_a_sidecar_is_written_without_pandas():
    code = (
        "import sys\n"
        "from mmstream.converting.rows.source import Row\n"
        "from mmstream.converting.sidecar import SidecarWriter\n"
        "from mmstream.storage import open_store\n"
        "with SidecarWriter(open_store('memory://a'), 'a.tar') as sidecar:\n"
        "    sidecar.add_sample(Row(0, 'a', 1, {}), 'a', {'txt': b'a'}, [])\n"
        "assert sidecar.num_bytes > 0 and 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

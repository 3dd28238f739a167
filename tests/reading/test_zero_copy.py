"""Raw samples as views of what was read: the same samples, valid as long as they are held."""

from __future__ import annotations

import gc

import pytest

import mmstream as mm
from tests.helpers.stores import far


@pytest.mark.parametrize("is_far", [False, True])
def test_a_pipeline_of_views_is_the_same_batches_with_nothing_parsed(corpus, is_far):
    dataset = mm.open_dataset(corpus)
    as_bytes = mm.Pipeline(dataset, global_batch_size=8)
    source = far(dataset) if is_far else dataset
    as_views = mm.Pipeline(source, global_batch_size=8, zero_copy=True)
    assert as_views.order.identity() == as_bytes.order.identity()
    viewed = list(mm.Loader(as_views))
    gc.collect()  # a view stays valid after all else is gone
    for one, other in zip(mm.Loader(as_bytes), viewed, strict=True):
        assert one["__key__"] == other["__key__"]
        assert one["jpg"] == other["jpg"]
        assert {type(value) for name in ("jpg", "json") for value in other[name]} == {memoryview}
        assert all(value.readonly for value in other["jpg"])
    assert type(as_views.take(1)[0]["jpg"]) is memoryview


def test_views_refuse_decoders_and_workers(corpus):
    dataset = mm.open_dataset(corpus)
    with pytest.raises(mm.ConfigError, match="decoders take bytes"):
        mm.Pipeline(dataset, global_batch_size=8, zero_copy=True, decode=mm.Decode())
    pipeline = mm.Pipeline(dataset, global_batch_size=8, zero_copy=True)
    with pytest.raises(mm.ConfigError, match="num_workers=0"):
        next(iter(mm.Loader(pipeline, num_workers=1)))

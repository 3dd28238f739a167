"""From a pipeline to the plan beside the index of its dataset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.dataset.bad_list import write_bad
from mmstream.errors import ManifestError
from mmstream.packing.plan import open_plan
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import write_corpus

COUNTS = [20, 30]
DECODE = mm.Decode(text=mm.TextDecoder(byte_tokenizer(), max_length=4096))


def fields(number: int) -> dict[str, bytes]:
    """A text of 5 to 54 tokens, with the two that begin and end it."""
    return {"txt": b"x" * (number % 50 + 3)}


def write(folder: Path, counts: list[int]) -> Path:
    (folder / "mmstream.json").unlink(missing_ok=True)
    write_corpus(folder, counts, fields)
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus", COUNTS)


def pipeline_of(corpus: Path, **settings: Any) -> mm.Pipeline:
    return mm.Pipeline(
        mm.open_dataset(corpus), **({"global_batch_size": 2, "decode": DECODE} | settings)
    )


def test_a_plan_lies_beside_the_index_or_where_it_is_wanted(corpus: Path, tmp_path: Path) -> None:
    plan = mm.plan(pipeline_of(corpus), 128, name="mine")
    assert plan.url == str(corpus / "mmstream.plan.mine")
    assert plan.members.size == 50
    assert open_plan(str(plan.url)).digest == plan.digest
    other = mm.plan(pipeline_of(corpus), 128, name="mine", folder=tmp_path / "other")
    assert other.url == str(tmp_path / "other" / "mmstream.plan.mine")
    assert other.digest == plan.digest
    assert {path.name.split(".")[1] for path in (tmp_path / "other").iterdir()} == {
        "plan",
        "measure",
    }


def test_limits_are_those_of_the_pipeline_or_given(corpus: Path) -> None:
    packs = pipeline_of(corpus, batching=mm.Pack(64))
    assert mm.plan(packs).settings == mm.PackLimits(64)
    assert mm.plan(packs, 128).settings == mm.PackLimits(128)
    limits = mm.PackLimits(128, max_documents=2)
    assert mm.plan(packs, limits).settings == limits
    assert mm.plan(replace(packs, batching=mm.Pack(128, limits=limits))).settings == limits
    with pytest.raises(mm.ConfigError, match=r"how many tokens has a pack\? Give mm\.plan"):
        mm.plan(pipeline_of(corpus))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"epochs": []}, r"epochs=\[\]: give numbers from 0 up"),
        ({"epochs": [-1]}, r"epochs=\[-1\]: give numbers from 0 up"),
        ({"room": -1}, "room"),
        ({"patch_size": 0}, "patch_size"),
        ({"num_workers": -1}, "num_workers"),
        ({"name": "a/b"}, "cannot be the name of a folder"),
    ],
)
def test_impossible_arguments_are_refused(
    corpus: Path, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(mm.ConfigError, match=reason):
        mm.plan(pipeline_of(corpus), 128, **arguments)
    assert not list(corpus.glob("mmstream.plan.*"))


def test_what_cannot_be_planned_is_refused(corpus: Path) -> None:
    with pytest.raises(mm.ConfigError, match=r"pipeline=.*: give the mm"):
        mm.plan(str(corpus), 128)  # type: ignore[arg-type]
    with pytest.raises(mm.ConfigError, match="plan: no decoder makes the tokens of texts"):
        mm.plan(pipeline_of(corpus, decode=None), 128)


def test_a_plan_without_packs_is_refused_and_not_written(corpus: Path) -> None:
    with pytest.raises(mm.ConfigError, match=r"packs of 4 tokens.*: 50 too long; .* has 5 tokens"):
        mm.plan(pipeline_of(corpus), 4)
    limits = mm.PackLimits(128, where="num_tokens > 1000")
    with pytest.raises(mm.ConfigError, match=r"no plan was written: 50 condition$"):
        mm.plan(pipeline_of(corpus), limits)
    assert not list(corpus.glob("mmstream.plan.*"))


def test_a_plan_of_other_settings_is_replaced_only_if_asked(corpus: Path) -> None:
    pipeline = pipeline_of(corpus)
    mm.plan(pipeline, 128, name="mine")
    with pytest.raises(mm.ConfigError, match="a plan of other settings"):
        mm.plan(pipeline, 256, name="mine")
    assert mm.plan(pipeline, 256, name="mine", overwrite=True).settings.max_tokens == 256


def test_overwrite_cures_a_plan_that_is_refused(tmp_path: Path) -> None:
    """A sample that a plan counts anew, and whose lengths alone do not, has another text now."""
    write(tmp_path, [150])
    changed: set[str] = set()
    counted: list[str] = []

    def lengthened(sample: dict[str, Any]) -> dict[str, Any]:
        counted.append(sample["__key__"])
        return sample | {"txt": sample["txt"] + b"!" * (sample["__key__"] in changed)}

    packs = pipeline_of(tmp_path, batching=mm.Pack(64), before=(lengthened,))
    plan = mm.plan(packs)
    counted.clear()
    mm.plan(packs, measure_only=True)
    of_lengths = set(counted)
    counted.clear()
    packs.order  # noqa: B018
    changed.add(next(key for key in counted if key not in of_lengths))
    lengths = {path: path.read_bytes() for path in tmp_path.glob("mmstream.measure.*/*")}
    again = replace(packs)
    refused = "its lengths are not those of this pipeline: shard-"
    with pytest.raises(mm.ConfigError, match=refused):
        again.order  # noqa: B018
    with pytest.raises(mm.ConfigError, match=rf"{refused}.*; give another name, or replace it"):
        mm.plan(again)
    assert lengths == {path: path.read_bytes() for path in lengths}
    assert mm.plan(again, overwrite=True).url == plan.url
    assert replace(again).order.plan.num_units  # type: ignore[union-attr]


@pytest.mark.parametrize("content", ['{"version": 1}', "{"])
def test_overwrite_replaces_a_plan_that_cannot_be_read(corpus: Path, content: str) -> None:
    plan = mm.plan(pipeline_of(corpus), 128)
    Path(str(plan.url), "plan.json").write_text(content)
    with pytest.raises(ManifestError, match="run `mmstream plan` with --overwrite"):
        mm.plan(pipeline_of(corpus), 128)
    assert mm.plan(pipeline_of(corpus), 128, overwrite=True).digest == plan.digest


def test_appended_shards_form_new_groups(tmp_path: Path) -> None:
    write(tmp_path, COUNTS[:1])
    before = mm.plan(pipeline_of(tmp_path), 128)
    write(tmp_path, COUNTS)
    after = mm.plan(pipeline_of(tmp_path), 128)
    assert after.url == before.url
    assert after.num_groups == 2
    assert after.group_digests[:1] == before.group_digests
    assert mm.plan(pipeline_of(tmp_path), 128, overwrite=True).num_groups == 1


def test_samples_on_the_bad_list_are_left_out(corpus: Path) -> None:
    write_bad(mm.open_dataset(corpus), [[1, 4]])
    plan = mm.plan(pipeline_of(corpus), 128)
    assert plan.left_out.tolist() == [[24, 1, 29]]
    assert plan.members.size == 49


def test_each_source_of_a_mixture_is_planned_by_itself(tmp_path: Path) -> None:
    sources = {
        name: (mm.open_dataset(write(tmp_path / name, counts)), 1)
        for name, counts in {"a": [20], "b": [30, 10]}.items()
    }
    pipeline = mm.Pipeline(
        mm.Mixture(sources, epoch_steps=8),
        global_batch_size=2,
        decode=DECODE,
        batching=mm.Pack(64, weights_of="samples"),
    )
    plans = mm.plan(pipeline)
    assert {name: plan.members.size for name, plan in plans.items()} == {"a": 20, "b": 40}
    assert pipeline.order.plan.plans["b"].url == plans["b"].url  # type: ignore[union-attr]
    again = replace(pipeline, batching=mm.Pack(64, weights_of="samples", plan=plans))
    assert again.order.identity() == pipeline.order.identity()
    lengths = mm.plan(pipeline, measure_only=True)
    assert [measure.num_samples for measure in lengths.values()] == [20, 40]

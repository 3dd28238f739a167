"""From a dataset to the plan beside its index, by Python and by the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mmstream as mm
from mmstream.dataset.bad_list import write_bad
from mmstream.packing.measure_file import Measure, measure_folder, write_measure
from mmstream.packing.plan_file import open_plan
from tests.helpers.corpora import write_corpus

COUNTS = [20, 30]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path, COUNTS)
    measure(tmp_path)
    return tmp_path


def measure(folder: Path, num_shards: int | None = None, name: str = "default") -> None:
    """Write a measure with lengths from 5 to 54."""
    shards = mm.open_dataset(folder).manifest.shards[:num_shards]
    num_samples = sum(shard.num_samples for shard in shards)
    columns = {
        "num_tokens": np.arange(num_samples) % 50 + 5,
        "num_images": np.ones(num_samples, dtype=np.int64),
    }
    write_measure(Measure(shards, columns), measure_folder(str(folder), name))


def test_a_plan_lies_beside_the_index(corpus: Path) -> None:
    plan = mm.plan_packs(corpus, 128)
    assert plan.url == str(corpus / "mmstream.plan.default-128")
    assert plan.members.size == 50
    assert open_plan(str(plan.url)).digest == plan.digest


def test_a_plan_without_packs_is_refused_and_not_written(corpus: Path) -> None:
    with pytest.raises(mm.ConfigError, match=r"packs of 4 tokens.*: 50 too long; .* has 5 tokens"):
        mm.plan_packs(corpus, 4)
    with pytest.raises(mm.ConfigError, match=r"no plan was written: 50 condition$"):
        mm.plan_packs(corpus, 128, where="num_tokens > 1000")
    assert not list(corpus.glob("mmstream.plan.*"))


def test_the_command_says_how_full_the_packs_are(mmstream, corpus: Path) -> None:  # type: ignore[no-untyped-def]
    code, out, err = mmstream("plan", corpus, "--max-tokens", 128, "--where", "num_tokens > 9")
    assert (code, err) == (0, "")
    first, second, left_out, others, *_, last = out.splitlines()
    assert first.startswith("45 samples in ")
    assert "best-fit decreasing" in first
    assert second.endswith("; max_tokens binds")
    assert left_out == "left out: 5 samples, 35 tokens: condition"
    assert others.startswith("best-fit decreasing fills packs of other lengths: 256: ")
    assert last.startswith(f"plan: {corpus}/mmstream.plan.default-128-")
    code, out, err = mmstream("plan", corpus, "--max-tokens", 128, "--max-images", 2, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["binding_limit"] == "max_images"


def test_mistakes_are_one_line(mmstream, corpus: Path) -> None:  # type: ignore[no-untyped-def]
    for words, message in (
        (["--max-tokens", 128, "--where", "size > 1"], "the measure has no such column, but"),
        (["--max-tokens", 128, "--where", "size >"], "is no condition over columns"),
        (["--max-tokens", 100, "--document-multiple-of", 8], "needs a multiple of"),
        (["--max-tokens", 128, "--name", "a/b"], "cannot be the name of a folder"),
    ):
        code, out, err = mmstream("plan", corpus, *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
    code, out, err = mmstream("plan", corpus, "--max-tokens", 128, "--measure", "absent")
    assert (code, out) == (1, "")
    assert "run `mmstream measure` first" in err


def test_a_plan_of_other_settings_is_replaced_only_if_asked(corpus: Path) -> None:
    mm.plan_packs(corpus, 128, name="mine")
    with pytest.raises(mm.ConfigError, match="a plan of other settings"):
        mm.plan_packs(corpus, 256, name="mine")
    assert mm.plan_packs(corpus, 256, name="mine", overwrite=True).settings.max_tokens == 256


def test_appended_shards_form_new_groups(tmp_path: Path) -> None:
    write_corpus(tmp_path, COUNTS[:1])
    measure(tmp_path)
    before = mm.plan_packs(tmp_path, 128)
    (tmp_path / "mmstream.json").unlink(missing_ok=True)
    write_corpus(tmp_path, COUNTS)
    with pytest.raises(mm.ConfigError, match="the measure is of 1 shards, and the dataset has 2"):
        mm.plan_packs(tmp_path, 128)
    measure(tmp_path)
    after = mm.plan_packs(tmp_path, 128)
    assert after.num_groups == 2
    assert after.group_digests[:1] == before.group_digests


def test_samples_on_the_bad_list_are_left_out(corpus: Path) -> None:
    write_bad(mm.open_dataset(corpus), [[1, 4]])
    plan = mm.plan_packs(corpus, 128)
    assert plan.left_out.tolist() == [[24, 1, 29]]
    assert plan.members.size == 49

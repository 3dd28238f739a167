"""The plan of a pipeline: one that fits is taken, else a new one is made where that is quick."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

import mmstream as mm
from mmstream.batching.batching import Pack
from mmstream.dataset.index_cache import cache_folder
from mmstream.errors import ConfigError
from mmstream.measuring import automatic
from mmstream.measuring.automatic import find_plan
from mmstream.packing.settings import PackLimits
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import write_corpus

COUNTS = [30, 20, 10]


def decode_with(tokenizer: Any) -> mm.Decode:
    return mm.Decode(text=mm.TextDecoder(tokenizer, max_length=4096))


def larger() -> mm.Decode:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("word", normalized=False)])
    return decode_with(tokenizer)


DECODE = decode_with(byte_tokenizer())


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_corpus(tmp_path / "corpus", COUNTS)


def folders(corpus: str) -> list[str]:
    return sorted(path.name for path in Path(corpus).iterdir() if path.is_dir())


def test_a_small_corpus_is_measured_and_planned_once(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = find_plan(mm.open_dataset(corpus), Pack(512), DECODE)
    assert plan.members.size == sum(COUNTS)
    assert plan.settings == PackLimits(512)
    written = folders(corpus)
    assert len(written) == 2
    assert written[0].startswith("mmstream.measure.auto-")
    assert written[1].startswith("mmstream.plan.auto-")
    assert written[1].endswith("-512")
    monkeypatch.setattr(automatic, "measure_into", None)
    monkeypatch.setattr(automatic, "plan_packs", None)
    again = find_plan(mm.open_dataset(corpus), Pack(512), DECODE)
    assert again.digest == plan.digest
    assert again.url == plan.url


def test_other_limits_are_planned_from_the_same_measure(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = mm.open_dataset(corpus)
    find_plan(dataset, Pack(512), DECODE)
    monkeypatch.setattr(automatic, "measure_into", None)
    plan = find_plan(dataset, Pack(512, limits=PackLimits(512, max_documents=3)), DECODE)
    assert plan.settings.max_documents == 3
    assert int(plan.sums(np.arange(plan.num_units)).num_documents.max()) == 3


def test_a_plan_beside_the_index_is_taken(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mm.measure(corpus, decode=DECODE, name="mine")
    plan = mm.plan_packs(corpus, 512, measure="mine")
    monkeypatch.setattr(automatic, "measure_into", None)
    monkeypatch.setattr(automatic, "plan_packs", None)
    assert find_plan(mm.open_dataset(corpus), Pack(512), DECODE).url == plan.url


def test_where_nothing_may_be_written_the_plan_lies_in_the_cache(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    plan = find_plan(mm.open_dataset(corpus), Pack(512), DECODE)
    assert folders(corpus) == []
    assert plan.url is not None
    assert plan.url.startswith(str(tmp_path / "cache"))
    monkeypatch.setattr(automatic, "measure_into", None)
    assert find_plan(mm.open_dataset(corpus), Pack(512), DECODE).url == plan.url
    assert cache_folder("index") is not None  # it takes folders of this user alone
    plans = tmp_path / "cache/mmstream/plans"
    plans.rename(tmp_path / "scratch")
    plans.symlink_to(tmp_path / "scratch")
    assert find_plan(mm.open_dataset(corpus), Pack(512), DECODE).url == plan.url
    plans.chmod(0o777)
    assert automatic._cache_root(mm.open_dataset(corpus)) is None


def test_a_tokenizer_with_one_more_token_is_refused_where_a_plan_is_named(corpus: str) -> None:
    mm.measure(corpus, decode=DECODE)
    mm.plan_packs(corpus, 512)
    dataset = mm.open_dataset(corpus)
    assert find_plan(dataset, Pack(512, plan="default-512"), DECODE).num_units
    with pytest.raises(ConfigError) as error:
        find_plan(dataset, Pack(512, plan="default-512"), larger())
    words = str(error.value)
    assert "mmstream.plan.default-512: its lengths are not those of this pipeline: " in words
    assert "shard-000000.tar[1] 000001: 14 tokens, 17 in the measure" in words
    assert "what differs: tokenizer" in words


def test_a_measure_that_does_not_fit_is_said_and_the_corpus_measured_anew(
    corpus: str, caplog: pytest.LogCaptureFixture
) -> None:
    mm.measure(corpus, decode=DECODE)
    with caplog.at_level(logging.WARNING):
        find_plan(mm.open_dataset(corpus), Pack(512), larger())
    assert "mmstream.measure.default does not fit: shard-000000.tar[1]" in caplog.text
    assert "; the dataset is measured anew" in caplog.text


def test_ranks_do_not_wait_for_a_measure(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dataset = mm.open_dataset(corpus)
    with pytest.raises(ConfigError, match=r"mm\.Pack\(512\): no measure .* run `mmstream measure"):
        find_plan(dataset, Pack(512), DECODE)
    mm.measure(corpus, decode=DECODE)
    command = r"`mmstream plan .* --measure default --max-tokens 512 --max-images 2`"
    with pytest.raises(ConfigError, match=command):
        find_plan(dataset, Pack(512, limits=PackLimits(512, max_images=2)), DECODE)
    mm.plan_packs(corpus, 512)
    assert find_plan(dataset, Pack(512), DECODE).num_units


def test_a_long_measure_is_left_to_a_command_with_its_time(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic, "MAX_SECONDS", 0.0)
    with pytest.raises(ConfigError, match=r"measuring takes about 0 s here: run `mmstream measure"):
        find_plan(mm.open_dataset(corpus), Pack(512), DECODE)
    assert folders(corpus) == []


def test_a_measure_of_the_draws_of_another_seed_does_not_fit(corpus: str) -> None:
    mm.measure(corpus, decode=DECODE, seed=3, epochs=[0])
    mm.plan_packs(corpus, 512)
    dataset, pack = mm.open_dataset(corpus), Pack(512, plan="default-512")
    assert find_plan(dataset, pack, DECODE, seed=3).num_units
    with pytest.raises(ConfigError, match="the random draws of seed 3, not of 0"):
        find_plan(dataset, pack, DECODE, seed=0)


def test_a_plan_of_other_packs_is_refused(corpus: str) -> None:
    mm.measure(corpus, decode=DECODE)
    mm.plan_packs(corpus, 512)
    dataset = mm.open_dataset(corpus)
    for pack, reason in (
        (Pack(256, plan="default-512"), r"mm\.Pack\(256\): .* has packs of 512 tokens"),
        (Pack(512, plan="default-512", limits=PackLimits(512, max_images=2)), "has other limits"),
    ):
        with pytest.raises(ConfigError, match=reason):
            find_plan(dataset, pack, DECODE)


def test_a_pipeline_packs_by_itself_and_its_rows_are_those_of_the_plan(corpus: str) -> None:
    def pipeline() -> mm.Pipeline:
        return mm.Pipeline(
            mm.open_dataset(corpus), batching=Pack(512), decode=DECODE, global_batch_size=2
        )

    keys = [batch["__key__"] for batch in mm.Loader(pipeline())]
    assert len({key for of_batch in keys for key in of_batch}) == sum(map(len, keys)) > 30
    assert [batch["__key__"] for batch in mm.Loader(pipeline())] == keys


def test_without_a_decoder_of_texts_a_plan_must_be_named(corpus: str) -> None:
    dataset = mm.open_dataset(corpus)
    with pytest.raises(ConfigError, match=r"mm\.Pack: no decoder makes the tokens of texts"):
        find_plan(dataset, Pack(512), None)
    mm.measure(corpus, decode=DECODE)
    mm.plan_packs(corpus, 512)
    assert find_plan(dataset, Pack(512, plan="default-512"), None).num_units


def test_documents_of_packs_are_as_long_as_their_plan_leaves_room_for(corpus: str) -> None:
    limits = PackLimits(512, document_multiple_of=16)
    pipeline = mm.Pipeline(
        mm.open_dataset(corpus),
        global_batch_size=2,
        decode=DECODE,
        batching=mm.Pack(512, limits=limits, layout="rows"),
    )
    for batch in mm.Loader(pipeline):
        assert batch["input_ids"].shape == (2, 512)
        assert not (batch["cu_seq_lens_q"].diff() % 16).any()
    plain = mm.Pack(512, document_multiple_of=8)
    with pytest.raises(ConfigError, match="its plan leaves room for multiples of 1"):
        next(iter(mm.Loader(replace(pipeline, batching=plain))))


def test_samples_and_shards_that_no_epoch_shows_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = ["short", "a text of more than thirty-two tokens", "three"]
    corpus = write_corpus(tmp_path / "a", [3], lambda number: {"txt": texts[number].encode()})
    dataset = mm.open_dataset(corpus)
    plan = find_plan(dataset, Pack(32), DECODE)
    assert plan.members.size == 2
    assert "no epoch shows the samples that are in no pack: 1 too long" in caplog.text
    other = mm.open_dataset(write_corpus(tmp_path / "b", [3]))
    with pytest.raises(ConfigError, match="is of other shards than"):
        find_plan(other, Pack(32, plan=plan), DECODE)


def test_a_plan_of_the_first_shards_is_warned_of(
    corpus: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = mm.open_dataset(corpus)
    plan = find_plan(dataset, Pack(512), DECODE)
    assert "shards" not in caplog.text
    plan = replace(plan, shards=plan.shards[:2], url=None, reopen=None)
    find_plan(dataset, Pack(512, plan=plan), DECODE)
    assert "is of the first 2 of 3 shards, and the others are not read" in caplog.text

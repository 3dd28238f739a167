"""The plan of a pipeline: found by the name that `mm.plan` gives it, and refused if it misfits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

import mmstream as mm
from mmstream.batching.flat import Pack
from mmstream.batching.lengths import plan_of_digest
from mmstream.errors import ConfigError, ManifestError
from mmstream.packing.plan import PackLimits, PackPlan
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import jpeg, write_corpus

Sample = dict[str, Any]

COUNTS = [30, 20, 10]


def decode_with(tokenizer: Any) -> mm.Decode:
    return mm.Decode(text=mm.TextDecoder(tokenizer, max_length=4096))


def larger() -> mm.Decode:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("word", normalized=False)])
    return decode_with(tokenizer)


DECODE = decode_with(byte_tokenizer())


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "corpus", COUNTS)


def pipeline_of(corpus: str, pack: Pack | None = None, **settings: Any) -> mm.Pipeline:
    return mm.Pipeline(
        mm.open_dataset(corpus),
        global_batch_size=2,
        batching=pack or Pack(512),
        **({"decode": DECODE} | settings),
    )


def plan_in(pipeline: mm.Pipeline) -> PackPlan:
    """Return the plan that a pipeline takes."""
    plan: PackPlan = pipeline.order.plan  # type: ignore[union-attr]
    return plan


def test_a_pipeline_finds_the_plan_of_its_decoders_and_limits(corpus: str) -> None:
    pipeline = pipeline_of(corpus)
    plan = mm.plan(pipeline)
    assert re.fullmatch(r".*/mmstream\.plan\.512-[0-9a-f]{12}", plan.url)
    assert plan_in(pipeline).url == plan.url
    assert plan_in(pipeline_of(corpus, decode=decode_with(byte_tokenizer()))).url == plan.url
    limits = PackLimits(512, max_documents=3)
    other = mm.plan(pipeline, limits)
    assert plan_in(pipeline_of(corpus, Pack(512, limits=limits))).url == other.url != plan.url
    keys = [batch["__key__"] for batch in mm.Loader(pipeline)]
    assert len({key for of_batch in keys for key in of_batch}) == sum(map(len, keys)) > 30


def test_without_a_plan_a_loader_says_the_command(corpus: str) -> None:
    pipeline = pipeline_of(corpus, Pack(512, limits=PackLimits(512, max_images=2)))
    command = rf"`mmstream plan {corpus} --max-tokens 512 --max-images 2 --pipeline MODULE:OBJECT`"
    with pytest.raises(ConfigError, match=rf"no plan of these decoders .* run {command} once, or"):
        mm.Loader(pipeline)
    mm.plan(pipeline, 512)
    with pytest.raises(ConfigError, match=command):
        mm.Loader(pipeline)
    mm.plan(pipeline)
    with pytest.raises(ConfigError, match="no plan of these decoders"):
        mm.Loader(replace(pipeline, decode=larger()))
    mm.Loader(pipeline).close()


def shouting(sample: Sample) -> Sample:
    return {**sample, "txt": sample["txt"] + b"!"}


def quiet(sample: Sample) -> Sample:
    return sample


def wide(sample: Sample) -> Sample:
    """As a function whose body has changed: the name is that of `quiet`."""
    return {**sample, "txt": sample["txt"] + b" " * 9}


wide.__qualname__ = "quiet"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decode": larger()}, r"\d+ tokens, and \d+ in the plan; what differs: tokenizer"),
        ({"before": (shouting,)}, "what differs: before: run"),
        ({"before": (wide,)}, "what differs: no setting, so a function or a library: run"),
    ],
)
def test_a_plan_of_other_lengths_is_refused_with_the_command(
    corpus: str, settings: dict[str, Any], words: str
) -> None:
    mm.plan(pipeline_of(corpus, before=(quiet,)), name="mine")
    named = pipeline_of(corpus, Pack(512, plan="mine"), before=(quiet,))
    assert plan_in(named).num_units
    refused = replace(named, **settings)
    with pytest.raises(ConfigError) as error:
        mm.Loader(refused)
    text = str(error.value)
    assert "mmstream.plan.mine: its lengths are not those of this pipeline: shard-" in text
    assert re.search(words, text)
    assert "--max-tokens 512 --overwrite --pipeline MODULE:OBJECT`" in text
    assert "\n" not in text


def test_a_changed_function_does_not_keep_its_plan_by_its_name(corpus: str) -> None:
    mm.plan(pipeline_of(corpus, before=(quiet,)))
    changed = pipeline_of(corpus, before=(wide,))
    with pytest.raises(ConfigError, match="its lengths are not those of this pipeline"):
        mm.Loader(changed)
    with pytest.raises(ConfigError, match="its lengths are not those of this pipeline"):
        mm.plan(changed)
    plan = mm.plan(changed, overwrite=True)
    assert plan_in(changed).url == plan.url


def test_a_sample_that_cannot_be_read_says_nothing_of_decoders(corpus: str) -> None:
    pipeline = pipeline_of(corpus)
    plan = mm.plan(pipeline)
    dataset = mm.open_dataset(corpus)
    for path in Path(corpus).glob("*.tar"):
        data = path.read_bytes()
        path.write_bytes(data[:512].replace(b"0", b"x") + data[512:])
    assert dataset.manifest.shards == plan.shards
    assert plan_in(pipeline_of(corpus)).digest == plan.digest


def test_the_samples_that_are_counted_anew_are_extreme_and_spread(tmp_path: Path) -> None:
    seen: list[str] = []

    def fields(number: int) -> dict[str, bytes]:
        length = {137: 200, 61: 0}.get(number, 50)
        return {"txt": b"x" * (length + 1), "jpg": jpeg(number, (400 if number == 93 else 30, 30))}

    def noted(sample: Sample) -> Sample:
        seen.append(sample["__key__"])
        return sample

    corpus = write_corpus(tmp_path, [50, 50, 50], fields)
    text = mm.TextDecoder(byte_tokenizer(), max_length=4096)
    decode = mm.Decode(image=mm.ImageDecoder(resize="max_pixels", multiple_of=14), text=text)
    pipeline = pipeline_of(corpus, decode=decode, before=(noted,))
    mm.plan(pipeline)
    seen.clear()
    plan = plan_in(pipeline)
    assert 12 <= len(seen) <= 16
    numbers = sorted(int(key) for key in seen)
    pack = next(
        unit.index.tolist()
        for unit in map(plan.units, [[number] for number in range(plan.num_units)])
        if 93 in (unit.shard * 50 + unit.index).tolist()
    )
    assert {137, 61} < set(numbers)
    assert any(50 + index in numbers for index in pack)
    assert max(after - before for before, after in pairwise(numbers)) < 30


def test_the_lengths_of_other_draws_are_refused(corpus: str) -> None:
    def drawn(sample: Sample) -> Sample:
        length = int(mm.sample_rng(sample, "length").integers(1, 50))
        return {**sample, "txt": "x" * length}

    pipeline = pipeline_of(corpus, before=(drawn,), seed=3)
    mm.plan(pipeline, epochs=range(2))
    assert plan_in(pipeline).num_units
    with pytest.raises(ConfigError, match="of the random draws of seed 3, not of 0"):
        mm.Loader(replace(pipeline, seed=0))


def test_room_and_texts_that_are_cut_are_counted_in(corpus: str) -> None:
    pipeline = pipeline_of(corpus, Pack(512, plan="roomy"))
    mm.plan(pipeline, name="roomy", room=7)
    assert plan_in(pipeline).num_units
    limits = PackLimits(10, overlong="truncate")
    text = mm.TextDecoder(byte_tokenizer(), max_length=10)
    cut = pipeline_of(corpus, Pack(10, limits=limits), decode=mm.Decode(text=text))
    mm.plan(cut)
    assert plan_in(cut).members.size == sum(COUNTS)


@pytest.mark.parametrize(
    ("pack", "reason"),
    [
        (Pack(256, plan="mine"), r"mm\.Pack\(256\): .* has packs of 512 tokens"),
        (Pack(512, plan="mine", limits=PackLimits(512, max_images=2)), "has other limits"),
    ],
)
def test_a_plan_of_other_packs_is_refused(corpus: str, pack: Pack, reason: str) -> None:
    mm.plan(pipeline_of(corpus), name="mine")
    with pytest.raises(ConfigError, match=reason):
        mm.Loader(pipeline_of(corpus, pack))


def test_without_a_decoder_of_texts_a_plan_must_be_named(corpus: str) -> None:
    mm.plan(pipeline_of(corpus), name="mine")

    def tokens(sample: Sample) -> Sample:
        return sample

    settings: dict[str, Any] = {"decode": None, "transforms": (tokens,)}
    with pytest.raises(ConfigError, match=r"mm\.Pack: no decoder makes the tokens of texts"):
        mm.Loader(pipeline_of(corpus, **settings))
    assert plan_in(pipeline_of(corpus, Pack(512, plan="mine"), **settings)).num_units


def test_settings_that_are_none_are_refused(corpus: str) -> None:
    plan = mm.plan(pipeline_of(corpus))
    edit(plan, lambda content: content["lengths"].update(epochs="all"))
    with pytest.raises(ManifestError, match=r"is damaged; run `mmstream plan` with --overwrite"):
        mm.Loader(pipeline_of(corpus))


def edit(plan: PackPlan, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the head of a plan, as a person does who edits it."""
    path = Path(str(plan.url), "plan.json")
    content = json.loads(path.read_text())
    content.pop("crc32c")
    change(content)
    path.write_text(json.dumps(content))


def test_a_state_finds_its_plan_beside_one_of_an_older_format(corpus: str) -> None:
    dataset = mm.open_dataset(corpus)
    old = mm.plan(pipeline_of(corpus), name="z")
    edit(old, lambda content: content.update(version=1, arrays=[content.pop("sha256")]))
    with pytest.raises(ManifestError, match="run `mmstream plan` with --overwrite"):
        plan_of_digest(dataset, old.digest)
    plan = mm.plan(pipeline_of(corpus), name="a")
    assert plan.digest == old.digest
    found = plan_of_digest(dataset, old.digest)
    assert found is not None
    assert found.url == plan.url


def test_documents_of_packs_are_as_long_as_their_plan_leaves_room_for(corpus: str) -> None:
    limits = PackLimits(512, document_multiple_of=16)
    pipeline = pipeline_of(corpus, Pack(512, limits=limits, layout="rows"))
    mm.plan(pipeline)
    for batch in mm.Loader(pipeline):
        assert batch["input_ids"].shape == (2, 512)
        assert not (batch["cu_seq_lens_q"].diff() % 16).any()
    plain = pipeline_of(corpus, Pack(512, document_multiple_of=8))
    mm.plan(plain)
    with pytest.raises(ConfigError, match="its plan leaves room for multiples of 1"):
        next(iter(mm.Loader(plain)))


def test_samples_and_shards_that_no_epoch_shows_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["short", "a text of more than thirty-two tokens", "three"]
    corpus = write_corpus(tmp_path / "a", [3], lambda number: {"txt": texts[number].encode()})
    pipeline = replace(pipeline_of(corpus, Pack(32)), global_batch_size=1)
    plan = mm.plan(pipeline)
    assert plan_in(pipeline).members.size == 2
    assert "no epoch shows the samples that are in no pack: 1 too long" in caplog.text
    other = pipeline_of(write_corpus(tmp_path / "b", [3]), Pack(32, plan=plan))
    with pytest.raises(ConfigError, match="is of other shards than"):
        mm.Loader(other)


def test_a_plan_of_the_first_shards_is_warned_of_where_it_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = write_corpus(tmp_path, COUNTS[:2])
    mm.plan(pipeline_of(corpus))
    mm.plan(pipeline_of(corpus), name="mine")
    Path(corpus, "mmstream.json").unlink(missing_ok=True)
    write_corpus(tmp_path, COUNTS)
    assert plan_in(pipeline_of(corpus, Pack(512, plan="mine"))).num_units
    assert "is of the first 2 of 3 shards, and the others are not read" in caplog.text
    with pytest.raises(ConfigError, match=r"is of the first 2 of 3 shards: run `mmstream plan "):
        mm.Loader(pipeline_of(corpus))
    mm.plan(pipeline_of(corpus))
    assert len(plan_in(pipeline_of(corpus)).shards) == 3

"""A state that was damaged is refused, or still means what it meant: never other batches."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

import mmstream as mm
from mmstream.dataset.bad_list import write_bad
from mmstream.errors import StateError
from mmstream.state import make_state, order_of_state, resume, state_at
from tests.helpers.bad_corpus import write_tiny
from tests.helpers.packed_texts import plan_texts, write_texts
from tests.helpers.states import edited

NUM_CHANGES = 300
"""Bytes that are changed in each state."""

NUM_EDITED = 60
"""Values that are changed in each state without a checksum, but for those that are huge."""

HUGE = 1 << 70


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, mm.Pipeline]:
    folder = tmp_path_factory.mktemp("states")
    dataset, listed = (write_tiny(folder / name, [30, 1, 0, 20]) for name in ("one", "listed"))
    write_bad(mm.open_dataset(listed), {(0, 3), (3, 7)})
    texts = {name: write_texts(folder / name, [40, 20]) for name in ("a", "b")}
    plans = {name: plan_texts(mm.open_dataset(url)) for name, url in texts.items()}

    def mixture(urls: dict[str, str], every: int | None = None) -> mm.Mixture:
        sources = {}
        for name, url in urls.items():
            whole = mm.open_dataset(url)
            sources[name] = whole if every is None else whole[::every], 2.0
        changes = {9: dict.fromkeys(urls, 1)}
        return mm.Mixture(sources, epoch_steps=6, changes=changes)

    def packed(source: Any, **settings: Any) -> mm.Pipeline:
        return pipeline(source, batching=mm.Pack(64, **settings), transforms=(dict,))

    def pipeline(source: Any, **settings: Any) -> mm.Pipeline:
        return mm.Pipeline(source, **{"global_batch_size": 4, "seed": 3, **settings})

    return {
        "dataset": pipeline(mm.open_dataset(dataset)),
        "lanes": pipeline(mm.open_dataset(dataset), reshuffle="lanes"),
        "bad list": pipeline(mm.open_dataset(listed), grid=(2, 2), window=5),
        "view": pipeline(mm.open_dataset(listed)[::2]),
        "mixture": pipeline(mixture({"x": dataset, "y": listed})),
        "mixture of views": pipeline(mixture({"x": dataset, "y": listed}, every=2), repeat=2),
        "packs": packed(mm.open_dataset(texts["a"]), plan=plans["a"]),
        "packs of a mixture": packed(mixture(texts), plan=plans, weights_of="samples"),
    }


KINDS = ["dataset", "lanes", "bad list", "mixture", "packs", "packs of a mixture"]


def changed_bytes(text: str, draw: random.Random) -> Iterator[str]:
    """The text with one character changed, removed, added or doubled."""
    for _ in range(NUM_CHANGES):
        i = draw.randrange(len(text))
        other = draw.choice('0123456789abcdef"{}[],:. -eEtfn' + chr(ord(text[i]) ^ 1))
        removed = text[:i] + text[i + 1 :]
        yield draw.choice([removed[:i] + other + removed[i:], removed, text[:i] + other + text[i:]])


def changed_values(value: Any, draw: random.Random) -> Iterator[Any]:
    """The value with one of its parts changed or left out, at every place."""
    others = [None, True, 0, 1, -1, "", "x", [], {}, 1.5, HUGE]
    if isinstance(value, int):
        others += [value + 1, value - 1, 2 * value, 10 * value, value ^ 4]
    if isinstance(value, str):
        others += [value[:-1], value + "0", value[::-1]]
    yield from (other for other in others if json.dumps(other) != json.dumps(value))
    if not isinstance(value, dict | list):
        return
    pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, part in pairs:
        if key == "crc32c":  # whoever leaves it out says that the state is as it should be
            continue
        changed = value.copy()
        for other in changed_values(part, draw):
            changed[key] = other
            yield changed
        del changed[key]
        yield changed


def outcome(pipeline: mm.Pipeline, state: Any, on_change: Any) -> tuple[Any, ...] | None:
    """Where a run goes on and in which order; None where the state is refused."""
    try:
        epoch, step, order = resume(pipeline.dataset, pipeline.order, state, on_change)
    except StateError:
        return None
    return epoch, step, order.identity()


@pytest.mark.parametrize("on_change", ["refuse", "finish_epoch"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_change_of_a_byte_leads_to_other_batches(
    pipelines: dict[str, mm.Pipeline], kind: str, on_change: str
) -> None:
    pipeline = pipelines[kind]
    state = make_state(pipeline.order, 1, 3)
    expected = outcome(pipeline, state, on_change)
    assert expected is not None
    num_refused = 0
    for text in changed_bytes(json.dumps(state), random.Random(kind)):
        try:
            damaged = json.loads(text)
        except ValueError:
            continue
        got = outcome(pipeline, damaged, on_change)
        num_refused += got is None
        assert got in (None, expected), text
    assert num_refused > NUM_CHANGES // 20


@pytest.mark.parametrize("kind", ["view", "mixture of views", "packs", "packs of a mixture"])
def test_a_state_that_was_edited_goes_on_or_is_refused_in_one_line(
    pipelines: dict[str, mm.Pipeline], kind: str
) -> None:
    source, order = pipelines[kind].dataset, pipelines[kind].order
    draw = random.Random(kind)
    for step in (0, 3):
        state = json.loads(json.dumps(edited(make_state(order, 1, step))))
        texts = [json.dumps(damaged) for damaged in changed_values(state, draw)]
        huge = [text for text in texts if str(HUGE) in text]
        for text in (*huge, *draw.sample(texts, NUM_EDITED)):
            damaged = json.loads(text)
            for read in (
                lambda damaged: resume(source, order, damaged, "finish_epoch"),
                lambda damaged: order_of_state(damaged, source, getattr(order, "plan", None)),
            ):
                refused = ""
                try:
                    read(damaged)
                except StateError as error:
                    refused = str(error)
                assert "\n" not in refused


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_change_of_a_value_leads_to_other_batches(
    pipelines: dict[str, mm.Pipeline], kind: str
) -> None:
    pipeline = pipelines[kind]
    for step in (0, 3):
        state = make_state(pipeline.order, 1, step)
        for damaged in changed_values(json.loads(json.dumps(state)), random.Random(0)):
            assert outcome(pipeline, damaged, "finish_epoch") is None, damaged


def test_a_default_that_nobody_gave_is_taken_from_an_intact_state_only(
    pipelines: dict[str, mm.Pipeline],
) -> None:
    pipeline = pipelines["dataset"]
    state = make_state(pipeline.order, 1, 3)
    damaged = {**state, "order": {**state["order"], "chunk": 7}}
    with pytest.raises(StateError, match=r'edited or damaged .* remove its "crc32c" to accept'):
        resume(pipeline.dataset, pipeline.order, damaged, "refuse")
    *_, order = resume(pipeline.dataset, pipeline.order, edited(damaged), "refuse")
    assert order.identity()["chunk"] == 7


def test_a_state_survives_storage_that_keeps_its_values_alone(
    pipelines: dict[str, mm.Pipeline],
) -> None:
    pipeline = pipelines["packs of a mixture"]
    state = make_state(pipeline.order, 1, 3)
    turned = dict(reversed(state.items())) | {"order": dict(reversed(state["order"].items()))}
    stored = json.loads(json.dumps(turned, indent=2)) | {"of": "a user"}
    assert outcome(pipeline, stored, "refuse") == outcome(pipeline, state, "refuse") is not None


def test_a_position_is_changed_by_a_new_checksum(pipelines: dict[str, mm.Pipeline]) -> None:
    pipeline = pipelines["dataset"]
    state = make_state(pipeline.order, 1, 3)
    assert state_at(state, 2, 5) == make_state(pipeline.order, 2, 5)
    assert outcome(pipeline, {**state, "step": 5}, "refuse") is None


@pytest.mark.parametrize("content", [float("nan"), {1, 2}, object()])
def test_what_is_no_json_is_refused_where_there_is_a_checksum(
    pipelines: dict[str, mm.Pipeline], content: object
) -> None:
    pipeline = pipelines["dataset"]
    state = make_state(pipeline.order, 1, 3)
    assert outcome(pipeline, {**state, "order": {**state["order"], "x": content}}, "refuse") is None

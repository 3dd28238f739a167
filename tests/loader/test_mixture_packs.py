"""Packs of a mixture in a loader: the same rows on every topology, sources apart, bad samples."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import mmstream as mm
from mmstream.cli import cli
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.packed_texts import plan_texts, write_texts

DECODE = mm.Decode(text=mm.TextDecoder(byte_tokenizer(), max_length=64))
ATTENTION = mm.Cost(tokens=0, squared_tokens=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("packs")
    return {
        "web": write_texts(folder / "web", [60, 60, 60]),
        "notes": write_texts(folder / "notes", [50]),
    }


def mixture_of(folders: dict[str, str], **settings: Any) -> mm.Mixture:
    settings = settings or {"epoch_steps": 8}
    weights = {"web": 3, "notes": 1}
    return mm.Mixture(
        {n: (mm.open_dataset(url), weights[n]) for n, url in folders.items()}, **settings
    )


def pipeline(folders: dict[str, str], **settings: Any) -> mm.Pipeline:
    mixture = mixture_of(folders)
    plans = {name: plan_texts(dataset) for name, dataset in mixture.datasets.items()}
    pack = {"plan": plans, "weights_of": "samples", "cost": ATTENTION} | settings.pop("pack", {})
    return mm.Pipeline(
        mixture,
        global_batch_size=6,
        decode=DECODE,
        batching=mm.Pack(64, **pack),
        **settings,
    )


def rows_of_steps(
    source: mm.Pipeline,
    world_size: int,
    state: dict[str, Any] | None,
    num_steps: int,
    **options: Any,
) -> tuple[list[dict[int, list[str]]], dict[str, Any]]:
    """Return source/key of the samples of each row of some steps, and the state after them."""
    steps: list[dict[int, list[str]]] = [{} for _ in range(num_steps)]
    for rank in range(world_size):
        loader = mm.Loader(source, world=mm.World(rank, world_size), **options)
        if state is not None:
            loader.load_state_dict(state)
        batches = (batch for _ in range(2) for batch in loader)
        for step, batch in zip(steps, batches, strict=False):
            lineage = batch["__lineage__"]
            for key, name, row in zip(
                batch["__key__"], batch["__source__"], lineage.rows, strict=True
            ):
                step.setdefault(lineage.order_row(row), []).append(f"{name}/{key}")
        after = loader.state_dict()
        loader.close()
    return steps, after


def test_a_run_killed_on_two_ranks_goes_on_with_three_and_then_with_workers(
    folders: dict[str, str],
) -> None:
    source = pipeline(folders)
    expected, _ = rows_of_steps(source, 1, None, 10)
    first, state = rows_of_steps(source, 2, None, 3)
    second, state = rows_of_steps(source, 3, json.loads(json.dumps(state)), 4)
    third, _ = rows_of_steps(source, 1, state, 3, num_workers=2)
    assert [*first, *second, *third] == expected
    rows = [pack for step in expected for pack in step.values()]
    assert all(len({key.split("/")[0] for key in pack}) == 1 for pack in rows)


def test_what_its_weights_are_proportions_of_must_be_said(folders: dict[str, str]) -> None:
    with pytest.raises(mm.ConfigError, match=r"samples.*tokens"):
        pipeline(folders, pack={"weights_of": None})
    with pytest.raises(mm.ConfigError, match="weights_of='rows'"):
        pipeline(folders, pack={"weights_of": "rows"})
    one = mixture_of(folders).datasets["web"]
    for settings in ({"weights_of": "samples"}, {"plan": {"web": plan_texts(one)}}):
        with pytest.raises(mm.ConfigError, match="is for a mixture"):
            mm.Pipeline(one, global_batch_size=6, decode=DECODE, batching=mm.Pack(64, **settings))


def test_each_source_needs_its_own_plan(folders: dict[str, str]) -> None:
    plan = plan_texts(mixture_of(folders).datasets["web"])
    with pytest.raises(mm.ConfigError, match="each source of a mixture has a plan of its own"):
        mm.Loader(pipeline(folders, pack={"plan": plan}))
    with pytest.raises(mm.ConfigError, match=r"names \['web'\], the sources are"):
        mm.Loader(pipeline(folders, pack={"plan": {"web": plan}}))


def test_a_bad_pack_becomes_one_of_its_source_and_quarantine_names_it(
    tmp_path: Path,
) -> None:
    folders = {
        "web": write_texts(tmp_path / "web", [60]),
        "notes": write_texts(tmp_path / "n", [60]),
    }

    def refuse_notes(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__source__"] == "notes" and int(sample["__key__"]) < 30:
            raise ValueError("half of the notes")
        return sample

    source = pipeline(
        folders,
        transforms=(refuse_notes,),
        bad_samples=mm.BadSamplePolicy(max_fraction=1.0, quarantine=str(tmp_path / "bad")),
    )
    loader = mm.Loader(source)
    for batch in loader:
        for key, name in zip(batch["__key__"], batch["__source__"], strict=True):
            assert name == "web" or int(key) >= 30
    assert loader.stats.num_bad > 0
    (file,) = (tmp_path / "bad").glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["shard"].split("/")[0] for line in lines} == {"notes"}


def test_plans_are_made_for_each_source_and_found_by_replay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folders = {
        "web": write_texts(tmp_path / "web", [60]),
        "notes": write_texts(tmp_path / "n", [20]),
    }
    source = pipeline(folders, pack={"plan": None})
    mm.plan(source)
    loader = mm.Loader(source)
    (words,) = [line for line in caplog.messages if "packs, on average" in line]
    assert words == "from step 0: of 32 packs, on average: 23 of web, 9 of notes"
    batch = next(iter(loader))
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    (tmp_path / "mix.json").write_text(
        json.dumps(
            {
                "sources": {
                    "web": {"url": "web", "weight": 3},
                    "notes": {"url": "n", "weight": 1},
                },
                "epoch_steps": 8,
            }
        )
    )
    arguments = ["replay", str(tmp_path / "mix.json"), "--state", str(tmp_path / "state.json")]
    result = CliRunner().invoke(cli, [*arguments, "--step", "0", "--keys", "--json"])
    assert result.exit_code == 0, result.output
    keys = [json.loads(line)["key"] for line in result.output.splitlines()]
    assert keys == batch["__key__"]


def test_another_plan_of_a_source_is_refused_and_the_message_says_so(
    folders: dict[str, str],
) -> None:
    loader = mm.Loader(pipeline(folders))
    next(iter(loader))
    datasets = mixture_of(folders).datasets
    longer = {name: plan_texts(dataset, 96) for name, dataset in datasets.items()}
    other = replace(
        pipeline(folders),
        batching=mm.Pack(96, plan=longer, weights_of="samples"),
        decode=mm.Decode(text=mm.TextDecoder(byte_tokenizer(), max_length=96)),
    )
    with pytest.raises(mm.StateError, match="give the plans that this run began with"):
        mm.Loader(other).load_state_dict(loader.state_dict())

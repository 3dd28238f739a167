"""Files that mmstream 0.1 saved: this version reads them and continues exactly where 0.1 stopped.

``tests/data/saved_by_0_1/README.md`` says what the files are and how they were made.
"""

from __future__ import annotations

import base64
import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mmstream as mm
from mmstream.dataset.checksums import checksums_name
from mmstream.dataset.manifest import MANIFEST_NAME, Manifest
from tests.helpers.paths import DATA

SAVED = DATA / "saved_by_0_1"
STATES = sorted(path.stem for path in SAVED.glob("expected/*.json") if path.stem != "training")
BAD_LIST, PREVIOUS_BAD_LIST = "mmstream.bad.json", "mmstream.bad.previous.json"
REFUSED = "a couple of buckets in a white room"
"""The caption that `augmented` refuses."""

Steps = list[dict[str, Any]]


def read_json(*names: str) -> Any:
    return json.loads(SAVED.joinpath(*names).read_text())


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def saved_state(name: str) -> dict[str, Any]:
    return read_json("states", f"{name}.json")


def expected(name: str) -> dict[str, Any]:
    return read_json("expected", f"{name}.json")


def as_in_0_1(data: bytes) -> bytes:
    """The bytes of a manifest, bad list or list of rejects without what 0.1 did not write."""
    added = rb'  ,"crc32c": "[0-9a-f]{8}"\n|  "checksums": "written",\n|,"key":"\d{9}"(?=\}\n)'
    return re.sub(added, b"", data)


def files_in(folder: Path) -> dict[str, bytes]:
    """The files that 0.1 writes too, but for the reports: they hold no rejects any more."""
    return {
        str(path.relative_to(folder)): as_in_0_1(path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix not in (".crc32c", ".parquet")
        and path.parent.name != "reports"
    }


@pytest.fixture
def saved(tmp_path) -> Path:
    """A copy of the files, to write in."""
    return Path(shutil.copytree(SAVED, tmp_path / "saved"))


# -- the runs whose states were saved ------------------------------------------------------------


def augmented(sample: dict[str, Any]) -> dict[str, Any]:
    """The transform of the saved runs: refuses one sample, filters another, draws a number."""
    text = sample.get("txt", "")
    if REFUSED in (text.decode() if isinstance(text, bytes) else text):
        raise ValueError("refused by a transform")
    content = sample.get("json")
    if isinstance(content, dict) and len(content.get("messages", ())) == 2:
        raise mm.SkipSample("a chat")
    return sample | {"draw": int(mm.sample_rng(sample).integers(1 << 31))}


def pipeline_of(
    case: dict[str, Any], folder: Path = SAVED, quarantine: str | None = None
) -> mm.Pipeline:
    """The pipeline of a saved run; the settings are those of ``expected/NAME.json``."""
    url = folder / case["data"]
    is_mixture = case["data"].endswith(".json")
    return mm.Pipeline(
        mm.open_mixture(url)
        if is_mixture
        else mm.open_dataset(url, bad_list=case.get("bad_list", True)),
        decode=mm.Decode(image=mm.ImageDecoder(size=4, crop="random", flip=0.5))
        if case.get("image", True)
        else None,
        transforms=(augmented,),
        bad_samples=mm.BadSamplePolicy(
            action=case.get("action", "substitute"),
            max_fraction=1.0,
            max_consecutive=0,
            quarantine=quarantine,
        ),
        **case["settings"],
    )


def loaders_of(
    case: dict[str, Any], folder: Path = SAVED, world_size: int = 1, num_workers: int = 0
) -> list[mm.Loader]:
    pipeline = pipeline_of(case, folder)
    return [
        mm.Loader(
            pipeline,
            world=mm.World(rank, world_size),
            rows_per_rank="balanced",
            num_workers=num_workers,
            on_change=case.get("on_change", "refuse"),
        )
        for rank in range(world_size)
    ]


def described(batch: dict[str, Any], name_of: Callable[[int], str]) -> dict[str, Any]:
    """A batch as ``expected/NAME.json`` writes it."""
    lineage = batch["__lineage__"]
    step = {
        "epoch": lineage.epoch,
        "step": lineage.step,
        "keys": batch["__key__"],
        "valid": batch["__valid__"].tolist(),
        "planned": [[name_of(shard), index] for shard, index in lineage.planned],
        "shown": [[name_of(shard), index] for shard, index in lineage.shown],
        "bad": [
            [
                record.row,
                record.kind,
                record.shard,
                record.index,
                record.substitute and list(record.substitute),
            ]
            for record in lineage.bad
        ],
        "draw": batch["draw"].tolist(),
    }
    return step | ({"source": batch["__source__"]} if "__source__" in batch else {})


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One global batch of the parts of all ranks."""
    columns = [name for name in parts[0] if name not in ("epoch", "step")]
    assert len({(part["epoch"], part["step"]) for part in parts}) == 1
    return parts[0] | {name: sum((part[name] for part in parts), []) for name in columns}


def two_epochs(loaders: Sequence[mm.Loader]) -> Iterator[list[dict[str, Any]]]:
    """The batches of all ranks, step by step: the rest of the epoch, then the next one."""
    for _ in range(2):
        yield from map(list, zip(*loaders, strict=True))


def steps_after(state: dict[str, Any], loaders: Sequence[mm.Loader]) -> Steps:
    """Load a state into the loaders of all ranks; return what they deliver."""
    name_of = loaders[0].pipeline.dataset.name_of
    try:
        for loader in loaders:
            loader.load_state_dict(state)
        return [
            joined([described(batch, name_of) for batch in batches])
            for batches in two_epochs(loaders)
        ]
    finally:
        for loader in loaders:
            loader.close()


def with_bad_lists(saved: Path, name: str) -> Path:
    """Put the bad list there that a state was saved with."""
    lists = {
        "bad_list": BAD_LIST,
        "finish_epoch": BAD_LIST,
        "previous_bad_list": PREVIOUS_BAD_LIST,
    }
    if name in lists:
        shutil.copyfile(saved / "bad_lists" / lists[name], saved / "captions" / BAD_LIST)
    return saved


# -- states --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", STATES)
def test_the_batches_after_a_state_are_those_that_0_1_delivered(name, world_size, saved):
    case = expected(name)
    world_size = min(world_size, case["settings"]["global_batch_size"])
    loaders = loaders_of(case, with_bad_lists(saved, name), world_size)
    assert steps_after(saved_state(name), loaders) == case["next"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world_size", "num_workers"),
    [("mid_epoch", 1, 3), ("last_step_kept", 2, 1), ("mixture_mid_run", 1, 2)],
)
def test_worker_processes_deliver_what_0_1_delivered_without_them(name, world_size, num_workers):
    case = expected(name)
    loaders = loaders_of(case, world_size=world_size, num_workers=num_workers)
    assert steps_after(saved_state(name), loaders) == case["next"]


def test_random_crops_and_flips_after_a_state_are_those_of_0_1():
    case = expected("mid_epoch")
    (loader,) = loaders_of(case)
    loader.load_state_dict(saved_state("mid_epoch"))
    for (batch,), text in zip(two_epochs([loader]), case["pixels"], strict=True):
        images = batch["image"].numpy().astype(int)
        pixels = np.frombuffer(base64.b64decode(text), dtype=np.uint8)
        differences = np.abs(images - pixels.reshape(images.shape)).mean(axis=(1, 2, 3))
        # Another JPEG library may round differently; another crop differs by 20 levels and more.
        assert differences.max() < 3


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_was_loaded_is_saved_as_0_1_saved_it(name, saved):
    case = expected(name)
    if name == "fresh":  # the present defaults begin here, and 0.1 had another window
        case["settings"]["window"] = 8192
    (loader,) = loaders_of(case, with_bad_lists(saved, name))
    loader.load_state_dict(saved_state(name))
    state = json.loads(json.dumps(loader.state_dict()))
    assert state.pop("crc32c")  # what 0.1 did not save
    for corpus in state["order"].get("sources", [state["order"]]):
        assert corpus.pop("sizes")
        corpus.pop("sha256")
    assert state == saved_state(name)


@pytest.mark.parametrize("name", STATES)
def test_a_state_of_0_1_is_loaded_with_one_warning_of_what_cannot_be_checked(name, saved, caplog):
    (loader,) = loaders_of(expected(name), with_bad_lists(saved, name))
    with caplog.at_level("WARNING", "mmstream.state"):
        loader.load_state_dict(saved_state(name))
        assert len(caplog.messages) == 1
        assert "only names and sample counts were compared" in caplog.text
        loader.load_state_dict(loader.state_dict())
    assert len(caplog.messages) == 1


def test_a_state_with_the_bad_list_before_the_last_change_needs_that_list_back(saved):
    case = expected("previous_bad_list")
    for name in (BAD_LIST, PREVIOUS_BAD_LIST):
        shutil.copyfile(saved / "bad_lists" / name, saved / "captions" / name)
    (loader,) = loaders_of(case, saved)
    with pytest.raises(mm.StateError, match=r"mmstream\.bad\.previous\.json"):
        loader.load_state_dict(saved_state("previous_bad_list"))
    (saved / "captions" / PREVIOUS_BAD_LIST).replace(saved / "captions" / BAD_LIST)
    loaders = loaders_of(case, saved)
    assert steps_after(saved_state("previous_bad_list"), loaders) == case["next"]


# -- states that were altered --------------------------------------------------------------------

Keys = tuple[str | int, ...]


def leaves(value: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield (keys that lead to it, value) of all plain values in nested dicts and lists."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        if isinstance(item, dict | list):
            yield from leaves(item, (*keys, key))
        else:
            yield (*keys, key), item


def altered(state: dict[str, Any], keys: Keys, value: Any) -> dict[str, Any]:
    state = copy.deepcopy(state)
    target: Any = state
    for key in keys[:-1]:
        target = target[key]
    target[keys[-1]] = value
    return state


IN_MID_EPOCH = ["mid_epoch", "last_step_kept", "mixture_mid_run"]
ALTERABLE = [
    (name, keys)
    for name in IN_MID_EPOCH
    for keys, _ in leaves(saved_state(name))
    if keys not in (("epoch",), ("step",))
]
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.lists(st.integers(0, 9), max_size=3)
)


@pytest.fixture(scope="module")
def orders() -> dict[str, mm.Loader]:
    """Loaders of pipelines that say their grid and window."""
    cases = {name: expected(name) for name in IN_MID_EPOCH}
    cases["mid_epoch"]["settings"] |= {"grid": (1, 1), "window": 8192}
    return {name: loaders_of(case)[0] for name, case in cases.items()}


def is_possible_default(keys: Keys, value: Any) -> bool:
    """Whether this could be what a version chose: a pipeline cannot say interleave and chunk."""
    is_size = type(value) is int and 1 <= value <= 1 << 40
    return keys[-1] in ("interleave", "chunk") and is_size


@given(place=st.sampled_from(ALTERABLE), value=VALUES)
def test_an_altered_state_is_refused_in_mid_epoch(orders, place, value):
    name, keys = place
    state = saved_state(name)
    before = dict(leaves(state))[keys]
    if value == before or is_possible_default(keys, value):
        return
    with pytest.raises(mm.StateError):
        orders[name].load_state_dict(altered(state, keys, value))
    orders[name].load_state_dict(state)


@pytest.mark.parametrize("name", IN_MID_EPOCH)
@pytest.mark.parametrize(("key", "change"), [("seed", 1), ("num_shards", 1), ("window", 1)])
def test_the_message_names_what_was_altered(orders, name, key, change):
    state = saved_state(name)
    keys, before = next(item for item in leaves(state["order"]) if item[0][-1] == key)
    with pytest.raises(mm.StateError, match=rf"{key}\b.*{before + change}"):
        orders[name].load_state_dict(altered(state, ("order", *keys), before + change))


@pytest.mark.parametrize(("key", "value"), [("seed", 4), ("num_shards", 4), ("corpus", "0" * 32)])
def test_where_an_epoch_begins_corpus_and_seed_must_be_those_of_the_state(key, value):
    (loader,) = loaders_of(expected("epoch_begin"))
    with pytest.raises(mm.StateError, match=key):
        loader.load_state_dict(altered(saved_state("epoch_begin"), ("order", key), value))


def test_where_an_epoch_begins_all_other_settings_may_change():
    case = expected("epoch_begin")
    (loader,) = loaders_of(case | {"settings": {"global_batch_size": 5, "seed": 3}})
    loader.load_state_dict(saved_state("epoch_begin"))
    batch = next(iter(loader))
    assert len(batch["__key__"]) == 5
    assert (batch["__lineage__"].epoch, batch["__lineage__"].step) == (2, 0)


@pytest.mark.parametrize(
    ("epoch", "step"), [(0, 4), (0, -1), (-1, 0), (0.5, 0), (0, "1"), (0, None)]
)
def test_a_position_that_the_run_does_not_have_is_refused(orders, epoch, step):
    with pytest.raises(mm.StateError):
        orders["mid_epoch"].load_state_dict(
            saved_state("mid_epoch") | {"epoch": epoch, "step": step}
        )


@pytest.mark.parametrize("name", ["mid_epoch", "last_step_kept", "mixture_mid_run"])
@pytest.mark.parametrize(
    "settings", [{"seed": 77}, {"global_batch_size": 6}, {"window": 2}, {"shuffle": False}]
)
def test_a_state_of_0_1_is_refused_by_a_pipeline_with_other_settings(name, settings):
    case = expected(name)
    (loader,) = loaders_of(case | {"settings": case["settings"] | settings})
    with pytest.raises(mm.StateError):
        loader.load_state_dict(saved_state(name))


# -- what will be delivered, without data --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data"), [("mid_epoch", "captions"), ("mixture_mid_run", "mixture.json")]
)
def test_replay_of_a_state_prints_what_0_1_printed(mmstream, name, data):
    state = SAVED / "states" / f"{name}.json"
    words = ["--state", state, "--epoch", 3, "--step", "1:3", "--keys", "--json"]
    code, out, _ = mmstream("replay", SAVED / data, *words)
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert rows == read_lines(SAVED / "replayed" / f"{name}.jsonl")


# -- datasets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_samples", "num_shards"),
    [("captions", 13, 3), ("texts", 46, 3), ("indexed", 4, 2)],
)
def test_a_dataset_opens_and_its_shards_and_indexes_verify_clean(
    mmstream, name, num_samples, num_shards
):
    assert len(mm.open_dataset(SAVED / name)) == num_samples
    code, out, _ = mmstream("verify", SAVED / name)
    assert (code, out) == (0, f"ok: {num_samples} samples in {num_shards} shards\n")


def test_samples_hold_the_rows_that_were_converted():
    rows = dict(enumerate(read_lines(SAVED / "texts.jsonl"), start=1))
    rejects = [line["row"] for line in read_lines(SAVED / "texts" / "rejects.jsonl")]
    samples = {int(sample["__key__"]): sample for sample in mm.open_dataset(SAVED / "texts")}
    assert rejects == [8]
    assert samples.keys() == rows.keys() - set(rejects)
    for number, sample in samples.items():
        assert sample.get("txt", b"").decode() == rows[number].get("text", "")
        assert json.loads(sample["json"])["id"] == rows[number]["id"]


def test_the_rows_are_converted_to_the_same_bytes(saved, tmp_path):
    mm.convert(
        saved / "texts.jsonl", tmp_path / "new", samples_per_shard=20, shuffle_seed=7, num_workers=0
    )
    new, old = files_in(tmp_path / "new"), files_in(SAVED / "texts")
    manifests = [Manifest.from_bytes(files.pop(MANIFEST_NAME)) for files in (new, old)]
    (part,) = manifests[0].index_parts
    assert new.keys() - old.keys() == {part.name, "report.json"}  # 0.1 wrote neither
    assert new == old | {name: new[name] for name in (part.name, "report.json")}
    for shard in manifests[0].shards:
        assert (tmp_path / "new" / checksums_name(shard.name)).is_file()  # 0.1 wrote none
    # The texts have ids, so they keep their json. 0.1 had fewer options.
    source = {**manifests[0].source, "converter": 1}
    source = {key: value for key, value in source.items() if key in manifests[1].source}
    assert replace(manifests[0], source=source, checksums=None, index_parts=()) == manifests[1]


def test_a_finished_conversion_is_known_as_one_of_another_version(saved):
    with pytest.raises(mm.ConfigError, match=r"another version of mmstream.*\(converter 1, "):
        mm.convert(saved / "texts.jsonl", saved / "texts", samples_per_shard=20, shuffle_seed=7)
    with pytest.raises(mm.ConfigError, match="shuffle_seed was 7"):
        mm.convert(saved / "texts.jsonl", saved / "texts", samples_per_shard=20, shuffle_seed=8)
    assert files_in(saved / "texts") == files_in(SAVED / "texts")


def test_tars_of_others_are_indexed_to_the_same_bytes(mmstream, saved):
    for path in (saved / "indexed").glob("*.idx"):
        path.unlink()
    (saved / "indexed" / "mmstream.json").unlink()
    assert mmstream("index", saved / "indexed")[0] == 0
    new, old = files_in(saved / "indexed"), files_in(SAVED / "indexed")
    manifests = [Manifest.from_bytes(files.pop(MANIFEST_NAME)) for files in (new, old)]
    (part,) = manifests[0].index_parts
    assert new == old | {part.name: new[part.name]}  # 0.1 wrote no index in parts
    assert replace(manifests[0], index_parts=()) == manifests[1]


def test_a_mixture_file_opens_with_its_weights():
    mixture = mm.open_mixture(SAVED / "mixture.json")
    assert len(mixture) == 13 + 46 + 4
    assert mixture.fractions == {
        0: {"captions": 0.25, "texts": 0.75, "others": 0.0},
        7: {"captions": 0.5, "texts": 0.25, "others": 0.25},
        16: {"captions": 0.0, "texts": 0.5, "others": 0.5},
    }


# -- bad samples ---------------------------------------------------------------------------------


def samples_listed(path: Path) -> set[tuple[str, int]]:
    listed = json.loads(path.read_text())["bad"]
    return {(shard, index) for shard, indexes in listed.items() for index in indexes}


def test_samples_on_a_bad_list_are_left_out_of_every_epoch(saved):
    case = expected("bad_list")
    loaders = loaders_of(case, with_bad_lists(saved, "bad_list"))
    listed = samples_listed(saved / "captions" / BAD_LIST)
    steps = steps_after(saved_state("bad_list"), loaders)
    planned = {(shard, index) for step in steps for shard, index in step["planned"]}
    assert len(listed) == 3
    assert len(mm.open_dataset(saved / "captions")) == 13
    assert planned
    assert not planned & listed


def test_a_quarantine_file_makes_the_bad_list_that_0_1_made(mmstream, saved):
    captions, quarantine = saved / "captions", "quarantine/captions/quarantine-rank0.jsonl"
    assert mmstream("verify", captions, "--decode", "--write-bad")[0] == 1
    previous = (saved / "bad_lists" / PREVIOUS_BAD_LIST).read_bytes()
    assert as_in_0_1((captions / BAD_LIST).read_bytes()) == previous
    assert mmstream("verify", captions, "--quarantine", saved / quarantine)[0] == 0
    listed = as_in_0_1((captions / BAD_LIST).read_bytes())
    assert listed == (saved / "bad_lists" / BAD_LIST).read_bytes()
    assert as_in_0_1((captions / PREVIOUS_BAD_LIST).read_bytes()) == previous


@pytest.mark.parametrize(
    ("source", "folder"), [("captions", "captions"), ("others", "indexed"), ("texts", "texts")]
)
def test_a_quarantine_file_of_a_mixture_is_read_by_source(mmstream, saved, source, folder):
    quarantine = saved / "quarantine/mixture/quarantine-rank0.jsonl"
    words = ["--quarantine", quarantine, "--source", source]
    assert mmstream("verify", saved / folder, *words)[0] == 0
    bad = {
        (record["shard"].removeprefix(f"{source}/"), record["index"])
        for record in read_lines(quarantine)
        if record["shard"].startswith(f"{source}/") and record["kind"] != "SkipSample"
    }
    path = saved / folder / BAD_LIST
    assert bad == (samples_listed(path) if path.exists() else set())
    assert len(bad) == {"captions": 3, "others": 1, "texts": 0}[source]


def test_the_quarantine_files_of_all_ranks_of_a_training_run_are_read_together(mmstream, saved):
    files = sorted((saved / "training").glob("quarantine-rank*.jsonl"))
    assert len(files) == 2
    words = [word for file in files for word in ("--quarantine", file)]
    assert mmstream("verify", saved / "captions", *words)[0] == 0
    previous = saved / "bad_lists" / PREVIOUS_BAD_LIST
    assert as_in_0_1((saved / "captions" / BAD_LIST).read_bytes()) == previous.read_bytes()


def test_a_quarantine_file_of_another_corpus_is_refused(mmstream, saved):
    quarantine = saved / "quarantine/captions/quarantine-rank0.jsonl"
    text = quarantine.read_text()
    assert '"stamp": "5-' in text
    quarantine.write_text(text.replace('"stamp": "5-', '"stamp": "6-', 1))
    assert mmstream("verify", saved / "captions", "--quarantine", quarantine)[0] != 0
    assert not (saved / "captions" / BAD_LIST).exists()


def test_the_same_run_writes_the_same_quarantine_file(tmp_path):
    case = expected("mid_epoch")
    loader = mm.Loader(pipeline_of(case, quarantine=str(tmp_path)), world=mm.World())
    for _ in two_epochs([loader]):
        pass
    written, before = (
        [record | {"reason": None} for record in read_lines(folder / "quarantine-rank0.jsonl")]
        for folder in (tmp_path, SAVED / "quarantine" / "captions")
    )
    assert written == before


# -- training ------------------------------------------------------------------------------------

CHECKED = {
    "training": ("captions", "training", 8, 4),
    "training_mixture": ("photos.json", "states/training_mixture.json", 9, 6),
}


@pytest.mark.parametrize("name", CHECKED)
def test_training_logs_agree_with_the_plan(mmstream, name):
    data, state, num_steps, num_substituted = CHECKED[name]
    words = ["--state", SAVED / state, "--check", SAVED / name, "--json"]
    code, out, _ = mmstream("replay", SAVED / data, *words)
    report = json.loads(out)
    assert (code, report["holds"]) == (0, True)
    assert (report["num_steps"], report["substituted"]) == (num_steps, num_substituted)


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("column", ["planned", "step"])
def test_a_training_log_that_was_altered_does_not_agree(mmstream, saved, name, column):
    data, state, *_ = CHECKED[name]
    path = saved / name / "metrics-rank0.jsonl"
    lines = read_lines(path)
    entry = lines[2]["lineage"][0]
    if column == "planned":
        entry["planned"][0], entry["planned"][1] = entry["planned"][1], entry["planned"][0]
    else:
        entry["step"] = 0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (
        mmstream("replay", saved / data, "--state", saved / state, "--check", saved / name)[0] == 1
    )


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_as_0_1_went_on(mmstream, saved):
    code, _, _ = mmstream(
        "train", saved / "captions", "--out", saved / "training", "--model", saved / "model",
        "--freeze", "clip.text_model.*", "--freeze", "clip.vision_model.*", "--max-length", 12,
        "--seed", 5, "--epochs", 9, "--global-batch-size", 5, "--max-steps", 12,
        "--num-workers", 0, "--device", "cpu", "--log-keys",
    )  # fmt: skip
    assert code == 0
    lines = read_lines(saved / "training" / "metrics-rank0.jsonl")
    assert [line["num_steps"] for line in lines] == list(range(1, 13))
    for line, before in zip(lines[8:], read_json("expected", "training.json"), strict=True):
        assert line["loss"] == pytest.approx(before.pop("loss"), rel=1e-3)
        assert {name: line[name] for name in before} == before

"""Ranks that need the same rows: a device mesh names them, and one of them may read for the others.

The ranks of a test play all its parts one after the other, and write down what they have seen. So
each process imports torch once.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mmstream as mm
from mmstream.storage.transfers import TransferCounts
from mmstream.train.distributed import leave_group
from mmstream.train.tokenizer import byte_tokenizer
from mmstream.types import Batch
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.gloo_ranks import join_group, run_ranks

COUNTS = [22, 17, 25]
STEPS = 8
NAMES = ("dp", "cp", "tp")

num_decoded = 0
"""Samples that came to `counted` in this process."""


def fields_of(number: int) -> dict[str, bytes]:
    fields = {"jpg": jpeg(number, (20, 16)), "txt": f"number {number}".encode(), "cls": b"3"}
    if number == 30:
        fields["jpg"] = b"no picture"
    return fields | {"json": b'{"big": "%s", "none": null}' % (b"x" * 2000)}


def counted(sample: dict[str, Any]) -> dict[str, Any]:
    global num_decoded
    num_decoded += 1
    return sample


def fails_in_step_3(samples: list[dict[str, Any]]) -> Batch:
    if samples[0]["__lineage__"].step == 3:
        raise ValueError("these do not fit")
    return {"txt": [sample["txt"] for sample in samples]}


def odd(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"odd": Path("a")}


def pipeline(folder: Path, *transforms: Any, **options: Any) -> mm.Pipeline:
    text = mm.TextDecoder(byte_tokenizer(), max_length=24)
    decode = mm.Decode(image=mm.ImageDecoder(size=16), text=text)
    settings = {"bad_samples": mm.BadSamplePolicy(max_fraction=1), "decode": decode, **options}
    return mm.Pipeline(
        mm.open_dataset(folder / "shards"),
        global_batch_size=8,
        transforms=(counted, *transforms),
        **settings,
    )


def loader_of(pipeline: mm.Pipeline, share: Any = "broadcast", **options: Any) -> mm.Loader:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
    return mm.Loader(pipeline, **{"mesh": mesh, "data": "dp", "share": share, **options})


def plain(batch: Batch) -> Batch:
    """The batch without the costs of reading it."""
    kept = dict.fromkeys(("num_bytes", "num_requests", "num_wrong_reads"), 0)
    lineage = replace(batch["__lineage__"], transfers=TransferCounts(), **kept)
    return batch | {"__lineage__": lineage}


def error_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# -- the parts -----------------------------------------------------------------------------------


def an_epoch(folder: Path, share: str, **options: Any) -> dict[str, Any]:
    global num_decoded
    num_decoded = 0
    quarantine = folder / f"{share}-{len(options)}"
    policy = mm.BadSamplePolicy(quarantine=str(quarantine), max_fraction=1)
    loader = loader_of(pipeline(folder, bad_samples=policy), share, **options)
    batches = [plain(batch) for batch in loader]
    loader.close()
    counts = {"decoded": num_decoded, "requests": loader.stats.num_requests}
    return {"batches": batches, "state": loader.state_dict(), **counts}


def left_by_all(folder: Path) -> dict[str, Any]:
    """A loop that is left, two validations within the next one, and one that is left by close."""
    loader, seen = loader_of(pipeline(folder)), []
    validation = loader_of(pipeline(folder, shuffle=False))
    for batch in loader:
        seen.append(plain(batch))
        if len(seen) == 3:
            break
    for batch in loader:
        seen.append(plain(batch))
        if len(seen) in (5, 7):
            seen += [plain(batch) for batch in validation]
    state = loader.state_dict()
    batches = iter(loader)
    seen.append(plain(next(batches)))
    loader.close()
    loader.load_state_dict(state)
    seen += [plain(batch) for batch in loader]
    return {"batches": seen, "state": loader.state_dict()}


def expected_of_left_by_all(folder: Path, rank: int) -> list[Batch]:
    def epoch(number: int, **options: Any) -> list[Batch]:
        alone = mm.Loader(pipeline(folder, **options), world=mm.World(rank, 2))
        alone.load_state_dict(edited_epoch(alone.state_dict(), number))
        return [plain(batch) for batch in alone]

    one, two, valid = epoch(1), epoch(2), epoch(0, shuffle=False)
    return [*epoch(0)[:3], *one[:2], *valid, *one[2:], two[0], *two]


def edited_epoch(state: dict[str, Any], epoch: int) -> dict[str, Any]:
    kept = {name: value for name, value in state.items() if name != "crc32c"}
    return kept | {"epoch": epoch}


def left_by_the_reader(folder: Path, rank: int, how: str) -> str:
    loader = loader_of(pipeline(folder))
    batches = iter(loader)
    next(batches)
    if rank == 4:
        if how == "close":
            loader.close()
        del batches
        return "left"
    return error_of(lambda: list(batches))


def resumed(folder: Path) -> list[str]:
    """Two steps with four ranks a group, and the others with two."""
    loader = loader_of(pipeline(folder))
    for _, _ in zip(range(2), loader, strict=False):
        pass
    other = loader_of(pipeline(folder), data=("cp", "dp"))
    other.load_state_dict(loader.state_dict())
    return [key for batch in other for key in batch["__key__"]]


def an_error(folder: Path, **options: Any) -> dict[str, Any]:
    loader = loader_of(pipeline(folder, collate=fails_in_step_3), **options)
    seen: list[Batch] = []
    error = error_of(lambda: seen.extend(loader))
    return {"error": error, "num": len(seen), "state": loader.state_dict()}


def refused(folder: Path, rank: int) -> dict[str, str]:
    """What is an error on every rank, though only rank 3 is told something else."""
    given = {
        "share": {"share": "read" if rank == 3 else "broadcast"},
        "data": {"data": ("dp", "cp") if rank == 3 else "dp"},
        "no dimension": {"data": ("dq",) if rank == 3 else "dp"},
        "nowhere": {"data": "dq"},
    }
    errors = {
        name: error_of(lambda options=options: loader_of(pipeline(folder), **options))
        for name, options in given.items()
    }
    part = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))["tp"]
    errors["part"] = error_of(lambda: loader_of(pipeline(folder), mesh=part, data="tp"))
    seeds = pipeline(folder, seed=int(rank == 3))
    errors["seed"] = error_of(lambda: next(iter(loader_of(seeds))))
    errors["odd"] = error_of(lambda: list(loader_of(pipeline(folder, odd))))
    loaders = [loader_of(pipeline(folder)) for _ in range(2)]
    errors["order"] = error_of(lambda: next(iter(loaders[rank == 3])))
    few = mm.BadSamplePolicy(max_samples=0, quarantine=None)
    errors["limit"] = error_of(lambda: list(loader_of(pipeline(folder, bad_samples=few))))
    return errors


def parts_of(rank: int, folder: Path) -> dict[str, Callable[[], Any]]:
    return {
        "read": lambda: an_epoch(folder, "read"),
        "broadcast": lambda: an_epoch(folder, "broadcast"),
        "workers": lambda: an_epoch(
            folder, "broadcast", num_workers=1, multiprocessing_context="fork"
        ),
        "left by all": lambda: left_by_all(folder),
        "resumed": lambda: resumed(folder),
        "left": lambda: left_by_the_reader(folder, rank, "break"),
        "closed": lambda: left_by_the_reader(folder, rank, "close"),
        "error": lambda: an_error(folder),
        "error of a worker": lambda: an_error(
            folder, num_workers=1, multiprocessing_context="fork"
        ),
        "refused": lambda: refused(folder, rank),
    }


def play(rank: int, folder: Path) -> None:
    join_group(rank, folder / "meet", 8)
    seen = {}
    for name, part in parts_of(rank, folder).items():
        seen[name] = part()
        dist.barrier()
    (folder / f"seen-{rank}").write_bytes(pickle.dumps(seen))
    leave_group()


def play_until_killed(rank: int, folder: Path) -> None:
    join_group(rank, folder / "meet-killed", 4)
    mesh = init_device_mesh("cpu", (4,))  # without a name, which `data=()` needs none of
    loader = mm.Loader(pipeline(folder), mesh=mesh, data=(), share="broadcast")

    def run() -> None:
        for number, _ in enumerate(loader):
            if number == 2 and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    (folder / f"killed-{rank}").write_text(error_of(run))
    os._exit(0)


# -- the tests -------------------------------------------------------------------------------------


def assert_equal(one: Any, other: Any) -> None:
    """Compare values bit by bit, with their types and memory formats."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            assert_equal(one[name], other[name])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharing")
    write_corpus(folder / "shards", COUNTS, fields_of)
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """What each of eight ranks has seen."""
    run_ranks(play, folder, num_ranks=8)
    return [pickle.loads((folder / f"seen-{rank}").read_bytes()) for rank in range(8)]


@pytest.mark.slow
def test_one_of_four_reads_and_all_have_the_same_batches(
    folder: Path, seen: list[dict[str, Any]]
) -> None:
    for share in ("read", "broadcast", "workers"):
        for rank, of_rank in enumerate(seen):
            assert len(of_rank[share]["batches"]) == STEPS
            assert_equal(of_rank[share]["batches"], seen[rank // 4 * 4]["read"]["batches"])
            assert of_rank[share]["state"] == seen[0]["read"]["state"]
    for count in ("decoded", "requests"):
        read, broadcast = (
            [of_rank[share][count] for of_rank in seen] for share in ("read", "broadcast")
        )
        assert all(read)
        assert 4 * sum(broadcast) == sum(read)
        assert [rank for rank, number in enumerate(broadcast) if number] == [0, 4]
    assert any(of_rank["workers"]["requests"] for of_rank in seen)
    for name in ("read-0", "broadcast-0", "broadcast-2"):
        lines = [path.read_text().splitlines() for path in (folder / name).iterdir()]
        assert sum(map(len, lines)) == 1  # of the sample that is not a picture


@pytest.mark.slow
def test_loops_are_left_and_begun_anew(folder: Path, seen: list[dict[str, Any]]) -> None:
    for first in (0, 4):
        expected = expected_of_left_by_all(folder, first // 4)
        for of_rank in seen[first : first + 4]:
            assert_equal(of_rank["left by all"]["batches"], expected)
            assert of_rank["left by all"]["state"] == seen[0]["left by all"]["state"]


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh(seen: list[dict[str, Any]]) -> None:
    assert all(seen[rank]["resumed"] == seen[rank + 1]["resumed"] for rank in (0, 2, 4, 6))
    shown = [key for rank in (0, 2, 4, 6) for key in seen[rank]["resumed"]]
    expected = [
        key
        for rank in (0, 4)
        for batch in seen[rank]["read"]["batches"][2:]
        for key in batch["__key__"]
    ]
    assert sorted(shown) == sorted(expected)
    assert len(seen[0]["resumed"]) == 2 * (STEPS - 2)


@pytest.mark.slow
def test_a_reader_that_leaves_alone_ends_the_others(seen: list[dict[str, Any]]) -> None:
    for name in ("left", "closed"):
        texts = [of_rank[name] for of_rank in seen]
        assert texts[:4] == ["no error"] * 4
        assert texts[4] == "left"
        for text in texts[5:]:
            assert text.startswith("ConfigError: rank 4, which reads for this one: it has left")


@pytest.mark.slow
def test_an_error_of_the_reader_is_raised_on_all_ranks_at_its_step(
    seen: list[dict[str, Any]],
) -> None:
    for name in ("error", "error of a worker"):
        for rank, of_rank in enumerate(seen):
            assert of_rank[name]["num"] == of_rank[name]["state"]["step"] == 3
            assert "these do not fit" in of_rank[name]["error"]
            is_other = "which reads for this one" in of_rank[name]["error"]
            assert is_other == (rank not in (0, 4))
        assert len({str(of_rank[name]["state"]) for of_rank in seen}) == 1


@pytest.mark.slow
def test_what_does_not_fit_is_an_error_on_every_rank(seen: list[dict[str, Any]]) -> None:
    expected = {
        "share": "rank 3 differs from the other ranks: share is read there and broadcast elsewhere",
        "data": "rank 3 differs from the other ranks: data is cp, dp there and dp elsewhere",
        "no dimension": "rank 3 differs from the other ranks: mesh is data: 'dq' is not a dim",
        "nowhere": "ConfigError: data: 'dq' is not a dimension of the mesh, which has dp, cp, tp",
        "part": "mesh: it has 4 ranks, and the process group 8: give the mesh of all ranks",
        "seed": "rank 3 differs from the other ranks: seed is 1 there and 0 elsewhere",
        "odd": "batch['odd'] holds what cannot cross to other ranks (pathlib.PosixPath)",
        "order": "rank 3 differs from the other ranks: number of the loader on its mesh is ",
    }
    for rank, of_rank in enumerate(seen):
        is_bad = rank >= 4  # the bad sample is in rows of these
        assert ("BadSampleLimitError: " in of_rank["refused"]["limit"]) == is_bad
        for name, words in expected.items():
            assert words in of_rank["refused"][name]


@pytest.mark.slow
def test_a_reader_that_is_killed_ends_all(folder: Path) -> None:
    with pytest.raises(Exception, match="SIGKILL"):
        run_ranks(play_until_killed, folder, num_ranks=4)
    for rank in range(1, 4):
        text = (folder / f"killed-{rank}").read_text()
        assert text.startswith("MMStreamError: rank 0, which needs the same rows as this one, has")


def test_arguments_of_a_mesh_go_together(folder: Path) -> None:
    one = pipeline(folder)
    for options in ({"share": "broadcast"}, {"data": "dp"}, {"mesh": object()}):
        with pytest.raises(mm.ConfigError, match="go together, and without world="):
            mm.Loader(one, **options)
    with pytest.raises(mm.ConfigError, match="there is no process group yet"):
        mm.Loader(one, mesh=object(), data="dp")

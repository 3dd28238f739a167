"""A rank of a training run that differs from the others is named on all, before the first step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import mmstream as mm
from mmstream.train import TrainConfig, train
from mmstream.train.distributed import leave_group
from tests.helpers.gloo_ranks import join_group, run_ranks
from tests.test_other_corpus import one_byte_changed, write

pytestmark = pytest.mark.slow

WORLD_SIZE = 2
SETTINGS = {
    "image_size": 16, "global_batch_size": 8, "num_workers": 0, "max_steps": 2, "device": "cpu",
}  # fmt: skip

Change = Callable[[Path, int], dict[str, Any]]

REFUSED: dict[str, tuple[Change, str]] = {
    "seed": (lambda _folder, rank: {"seed": rank}, "seed is 1 there and 0 elsewhere"),
    "global_batch_size": (
        lambda _folder, rank: {"global_batch_size": 8 + rank},
        "global_batch_size is 9 there and 8 elsewhere",
    ),
    "image_size": (
        lambda _folder, rank: {"image_size": 16 + 16 * rank},
        "image_size is 32 there and 16 elsewhere",
    ),
    "lr": (lambda _folder, rank: {"lr": (rank + 1) * 1e-3}, "lr is 0.002 there and 0.001 elsewhe"),
    "model": (
        lambda _folder, rank: {"model": ("clip", "vlm")[rank]},
        "model is 'vlm' there and 'clip' elsewhere",
    ),
    "corpus": (
        lambda folder, rank: {"url": str(folder / "ab"[rank])},
        "bytes of the shards (hash of their sha256) is '",
    ),
    "corpus of a resumed run": (
        lambda folder, rank: {"url": str(folder / "ab"[rank]), "out": str(folder / "run")},
        "resuming is refused (",
    ),
}


def outcome_of(folder: Path, name: str, change: Change, rank: int) -> str:
    settings = {"url": str(folder / "a"), "out": str(folder / name), **SETTINGS}
    try:
        return str(train(TrainConfig(**{**settings, **change(folder, rank)})).num_steps)
    except mm.MMStreamError as error:
        return f"{type(error).__name__}: {error}"


def play(rank: int, folder_name: str) -> None:
    folder = Path(folder_name)
    join_group(rank, Path(folder, "rendezvous"), WORLD_SIZE, timeout_s=300)
    own_folders = {"log_dir": f"{folder}/logs-{rank}", "log_keys": not rank}
    outcomes = {"same": outcome_of(folder, "run", lambda *_: own_folders, rank)}
    for name, (change, _) in REFUSED.items():
        outcomes[name] = outcome_of(folder, name, change, rank)
    dist.barrier()
    (folder / f"outcomes-{rank}.json").write_text(json.dumps(outcomes))
    leave_group()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    """What every case ended with, on each rank."""
    folder = tmp_path_factory.mktemp("consistency")
    write(folder / "a")
    one_byte_changed(folder / "b")
    imports = ["tests.helpers.model_imports"]
    run_ranks(play, str(folder), num_ranks=WORLD_SIZE, late_imports=imports)
    names = [folder / f"outcomes-{rank}.json" for rank in range(WORLD_SIZE)]
    return folder, [json.loads(name.read_text()) for name in names]


@pytest.mark.parametrize("name", REFUSED)
def test_a_rank_that_differs_is_named_on_every_rank_before_the_first_step(played, name):
    folder, outcomes = played
    for outcome in outcomes:
        assert outcome[name].startswith("ConfigError: rank 1 differs from the other ranks: ")
        assert REFUSED[name][1] in outcome[name]
        assert "; no rank trains" in outcome[name]
    assert not list(folder.glob(f"{name}/checkpoints/*"))


def test_a_resumed_rank_says_why_it_was_refused(played):
    for outcome in played[1]:
        assert (
            "bytes (sha256) of the shards are not those of the state"
            in outcome["corpus of a resumed run"]
        )


def test_ranks_may_have_folders_and_logs_of_their_own(played):
    assert [outcome["same"] for outcome in played[1]] == ["2", "2"]

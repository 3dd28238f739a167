"""Several ranks do what one does: moved, uneven, validating, told to stop. Real data, tiny models.

Four processes play all parts one after another: as two ranks, as one, as four.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mmstream as mm
from mmstream.train import TrainConfig, TrainResult
from mmstream.train.distributed import TrainProcess
from mmstream.train.loop import fit
from mmstream.train.metrics import StepLog
from mmstream.train.models import CLIP_NORMALIZE, ContrastiveClip
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.bad_corpus import truncated_jpeg, write_faulty
from tests.helpers.gloo_ranks import play_parts, run_ranks
from tests.helpers.tiny_model import TinyModel
from tests.train import test_clip, test_vlm

pytestmark = pytest.mark.slow

TOLD = {
    "epochs": 2, "global_batch_size": 12, "lr": 3e-3, "warmup_steps": 3,
    "checkpoint_every": 4, "precision": "fp32", "log_keys": True, "num_workers": 0,
}  # fmt: skip


def open_batches(config: TrainConfig, **order: Any) -> Any:
    pipeline = mm.Pipeline(
        mm.open_dataset(config.url),
        global_batch_size=config.global_batch_size,
        decode=mm.Decode(
            image=mm.ImageDecoder(size=32), text=mm.TextDecoder(byte_tokenizer(), max_length=64)
        ),
        bad_samples=mm.BadSamplePolicy(quarantine=None),
        **order,
    )
    rows = config.rows_per_rank or "balanced"
    return mm.Loader(pipeline, rows_per_rank=rows, num_threads=1)


def train(
    corpus: str, out: Path, *, model: Any = None, filters: Any = (), hooks: Any = (), **changes: Any
) -> TrainResult:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    process = TrainProcess(
        torch.device("cpu"), dist.get_rank() if world_size > 1 else 0, world_size
    )
    config = TrainConfig(url=corpus, out=str(out), **{**TOLD, **changes})
    with (
        closing(open_batches(config, transforms=filters)) as loader,
        closing(open_batches(config, shuffle=False, drop_last=False)) as second,
    ):
        validation = mm.to_device(second, "cpu", normalize=CLIP_NORMALIZE)
        batches = mm.to_device(loader, "cpu", normalize=CLIP_NORMALIZE)
        return fit(config, model or TinyModel(), batches, process, validation, hooks)


class Interrupted(TinyModel):
    """Rank 1 alone is told to stop while it computes its sixth step."""

    def forward(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training and len(self.asked_rows) == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(batch)


class FailsOnRank1:
    """Notes what the second step has measured, and fails there on rank 1."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        self.seen.append([step, metrics["rank"]])
        if step == 2 and metrics["rank"] == 1:
            raise KeyError("nobody logged in")

    def on_checkpoint(self, path: str) -> None:
        self.seen.append([Path(path).name, Path(path).exists()])


class Unlabeled(TinyModel):
    """Rank 0 has no label at its second step. No rank has one at the third."""

    def weight_of(self, batch: dict[str, Any]) -> torch.Tensor:
        step = batch["__lineage__"].step
        return super().weight_of(batch) * (step != 2 and (step, dist.get_rank()) != (1, 0))


def without_some(sample: dict[str, Any]) -> dict[str, Any]:
    if int(sample["__key__"]) % 10 == 9:
        raise mm.SkipSample("not wanted")
    return sample


def train_with_a_slow_log(corpus: str, out: Path) -> bool:
    """Rank 1 takes half a second to log the step of the first checkpoint.

    Returns:
        Whether that checkpoint was there before rank 1 had logged the step.
    """
    write, was_there = StepLog.write, False

    def write_late(log: StepLog, line: dict[str, Any]) -> None:
        nonlocal was_there
        if line["num_steps"] == 4 and dist.get_rank() == 1:
            time.sleep(0.5)
            was_there = Path(out, "checkpoints", "step-00000004.pt").exists()
        write(log, line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepLog, "write", write_late)
        train(corpus, out, max_steps=5)
    return was_there


def as_two(corpus: str, folder: Path) -> None:
    rank = dist.get_rank()
    test_clip.save_on_two_ranks(rank, folder)
    test_vlm.save_on_two_ranks(rank, folder)
    train(corpus, folder / "moved", max_steps=6)
    train(corpus, folder / "even", checkpoint_every=5)
    train(corpus, folder / "uneven", rows_per_rank=(9, 3), micro_batches=3)
    train(str(folder / "faulty"), folder / "counted", filters=(without_some,), max_steps=8)
    stopped = train(corpus, folder / "stopped", model=Interrupted(), checkpoint_every=100)
    with pytest.raises(mm.MMStreamError) as refused:
        train(corpus, folder / "unlabeled", model=Unlabeled())
    hook = FailsOnRank1()
    with pytest.raises(mm.MMStreamError) as failed:
        train(corpus, folder / "hooked", hooks=[hook])
    summary = {
        "hooked": hook.seen,
        "failed": str(failed.value),
        "num_steps": stopped.num_steps,
        "stopped_by": stopped.stopped_by,
        "all_received_signal": stopped.all_received_signal,
        "saved_too_early": train_with_a_slow_log(corpus, folder / "slow-log"),
        "refused": str(refused.value),
    }
    (folder / f"stopped-{rank}.json").write_text(json.dumps(summary))


def play(rank: int, corpus: str, folder_name: str) -> None:
    """What each of the four processes does."""
    folder = Path(folder_name)
    as_one = partial(train, corpus, folder / "moved", max_steps=11, micro_batches=4)
    as_four = partial(train, corpus, folder / "moved")
    play_parts(rank, folder, [(2, partial(as_two, corpus, folder)), (1, as_one), (4, as_four)])


@pytest.fixture(scope="module")
def played(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_faulty(folder / "faulty", [30, 1, 0, 40, 26], {3, 41, 42, 80}, truncated_jpeg)
    run_ranks(play, corpus, str(folder), num_ranks=4, late_imports=["tests.helpers.model_imports"])
    return folder


@pytest.fixture(scope="module")
def alone(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed runs, on one rank, in this process."""
    folder = tmp_path_factory.mktemp("alone")
    train(corpus, folder / "tiny", checkpoint_every=5)
    return folder


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def curve(folder: Path, name: str = "loss") -> list[float]:
    return [line[name] for line in read(folder, "metrics-rank0.jsonl")]


def difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) / abs(b) for a, b in zip(one, other))


def test_a_run_that_moved_from_two_ranks_to_one_to_four_has_the_undisturbed_curve(
    played: Path, alone: Path
) -> None:
    moved, undisturbed = played / "moved", alone / "tiny"
    worlds = [line["world_size"] for line in read(moved, "metrics-rank0.jsonl")]
    assert worlds == [2] * 6 + [1] * 5 + [4] * 5
    result = difference(curve(moved), curve(undisturbed))
    logging.getLogger(__name__).info("largest relative difference of a loss: %.1e", result)
    assert result < 1e-5
    assert difference(curve(moved, "grad_norm"), curve(undisturbed, "grad_norm")) < 2e-4
    assert curve(moved, "lr") == curve(undisturbed, "lr")
    assert curve(undisturbed)[-1] < 0.97 * curve(undisturbed)[0]


def test_uneven_ranks_equal_even_ranks(played: Path, alone: Path) -> None:
    for name in ("even", "uneven"):
        assert difference(curve(played / name), curve(alone / "tiny")) < 1e-5
    weights = [
        torch.load(folder / "checkpoints" / "step-00000016.pt")["model"]
        for folder in (played / "uneven", played / "even", alone / "tiny")
    ]
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights[0], weights[2], rtol=1e-5, atol=1e-5)
    rows = [len(read(played / "uneven", f"metrics-rank{r}.jsonl")[0]["keys"]) for r in range(2)]
    assert rows == [9, 3]


def test_bad_and_filtered_samples_are_counted_over_all_ranks(played: Path) -> None:
    both = [read(played / "counted", f"metrics-rank{rank}.jsonl") for rank in range(2)]
    assert [line["bad"] for line in both[0]] == [line["bad"] for line in both[1]]
    config = TrainConfig(url=str(played / "faulty"), out="", **TOLD)
    with closing(open_batches(config, transforms=(without_some,))) as loader:
        for _, line in zip(loader, both[0], strict=True):  # one rank sees all there is
            assert line["bad"] == dict(loader.stats.bad)
            assert line["num_bad"] == loader.stats.num_bad
            assert line["num_skipped"] == loader.stats.num_skipped
            assert line["num_cut_texts"] == loader.stats.num_cut_texts
            fraction = loader.stats.num_cut_texts / loader.stats.num_samples
            assert line["cut_text_fraction"] == pytest.approx(fraction, abs=1e-4)
    assert line["num_bad"] >= 3
    assert line["num_skipped"] >= 8


def test_a_checkpoint_is_written_only_when_all_ranks_have_logged_its_step(played: Path) -> None:
    """Else a rank that is killed in between leaves a run whose log lacks the step."""
    assert not json.loads(Path(played, "stopped-1.json").read_text())["saved_too_early"]
    assert (played / "slow-log" / "checkpoints" / "step-00000004.pt").exists()


def test_all_ranks_end_at_a_step_without_a_label_and_none_at_a_rank_without_one(
    played: Path,
) -> None:
    for rank in range(2):
        refused = json.loads(Path(played, f"stopped-{rank}.json").read_text())["refused"]
        assert refused.startswith("step 3 has nothing to train: no row of any rank is valid and")
        assert len(read(played / "unlabeled", f"metrics-rank{rank}.jsonl")) == 3
    assert not list((played / "unlabeled" / "checkpoints").glob("*"))


def test_a_hook_that_fails_on_one_rank_ends_all_at_the_same_saved_step(played: Path) -> None:
    ends = [json.loads(Path(played, f"stopped-{rank}.json").read_text()) for rank in range(2)]
    saved = ["step-00000002.pt", True]
    assert [end["hooked"] for end in ends] == [[[1, 0], [2, 0], saved], [[1, 1], [2, 1]]]
    assert ends[0]["failed"] == "a hook of another rank has failed; see its log"
    assert ends[1]["failed"].startswith("train: the hook FailsOnRank1.on_step raised KeyError: ")
    assert [path.name for path in (played / "hooked" / "checkpoints").iterdir()] == saved[:1]


def test_validation_on_two_ranks_is_that_of_one(played: Path, alone: Path) -> None:
    on_one = read(alone / "tiny", "validation-rank0.jsonl")
    on_two = read(played / "even", "validation-rank0.jsonl")
    assert [line["num_steps"] for line in on_one] == [5, 10, 15, 16]
    assert [line["num_steps"] for line in on_two] == [5, 10, 15, 16]
    assert not (played / "even" / "validation-rank1.jsonl").exists()
    for one, two in zip(on_one, on_two):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["weight"] == one["weight"]


def test_a_signal_to_one_rank_stops_all_at_the_same_step(played: Path, alone: Path) -> None:
    for rank in range(2):
        summary = json.loads((played / f"stopped-{rank}.json").read_text())
        assert (summary["num_steps"], summary["stopped_by"]) == (6, "SIGTERM")
        assert not summary["all_received_signal"]
    saved = [path.name for path in (played / "stopped" / "checkpoints").iterdir()]
    assert saved == ["step-00000006.pt"]
    assert difference(curve(played / "stopped"), curve(alone / "tiny")[:6]) < 1e-5


@pytest.mark.parametrize("case", test_clip.CASES)
def test_two_ranks_compute_the_loss_and_gradients_of_one(played: Path, case: str) -> None:
    num_rows, _, invalid = test_clip.CASES[case]
    model = ContrastiveClip(test_clip.clip(), num_rows)
    batch = test_clip.global_batch(num_rows, invalid)
    expected = test_clip.loss_and_gradients(model, batch, slice(None))
    largest = max(gradient.abs().max() for gradient in expected["gradients"].values())
    assert largest > 1e-2, "gradients this small would compare equal to anything"
    for rank in range(2):
        on_two = torch.load(played / f"clip-{rank}.pt", weights_only=True)[case]
        torch.testing.assert_close(on_two, expected, rtol=1e-5, atol=1e-6)


def test_a_rank_without_images_does_not_stop_the_others(played: Path) -> None:
    expected = test_vlm.mean_gradients(test_vlm.vlm(), [test_vlm.global_batch()])
    for rank in range(2):
        on_two = torch.load(played / f"vlm-{rank}.pt")
        test_vlm.assert_same_gradients(expected, on_two)

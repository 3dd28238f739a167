"""Kill -9, restart elsewhere, nothing lost: the short form, and a checker that is able to fail."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import mmstream as mm
from tools.prove import attempt as prove_attempt, resume as prove_resume
from tools.prove.attempt import Attempt, wait_until
from tools.prove.corpus import Corpus, open_pipeline, write_corpus, write_mixture
from tools.prove.history import (
    FAULTS,
    History,
    Run,
    judge,
    kept_lines,
    read_start,
    with_fault,
)
from tools.prove.trainer import describe

G, EPOCHS = 16, 2


class Proof(NamedTuple):
    corpus: Corpus
    history: History
    quiet: Run

    def of(self, history: History):
        order = open_pipeline(self.corpus.url, G, 0).order
        return judge(history, self.quiet, self.corpus, order, EPOCHS)


def start(folder: Path, url: str, state, num_steps: int, world_size: int):
    """Deliver some steps to ranks without processes, as logged; return the log and the states."""
    folder.mkdir()
    states = {}
    for rank in range(world_size):
        world = mm.World(rank, world_size)
        loader = mm.Loader(open_pipeline(url, G, 0), rows_per_rank="balanced", world=world)
        if state is not None:
            loader.load_state_dict(state)
        begun = loader.state_dict()
        first = begun["epoch"] * len(loader) + begun["step"]
        lines = [{"resumed": first}]
        while len(lines) <= num_steps and loader.state_dict()["epoch"] < EPOCHS:
            for batch in loader:
                number, loss = first + len(lines) - 1, 0.5 * len(batch["__key__"]) / G
                lines.append(describe(batch) | {"number": number, "loss": loss})
                states[len(lines) - 1] = loader.state_dict()
                if len(lines) > num_steps:
                    break
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"rank{rank}.jsonl").write_text(text)
    return states


@pytest.fixture(scope="module")
def true(tmp_path_factory) -> Proof:
    """A run that resumed three times, twice from before it was killed, with bad samples in it."""
    folder = tmp_path_factory.mktemp("proof")
    corpus = write_corpus(folder / "corpus", 200, 0.05, seed=1)
    states = start(folder / "start-0", corpus.url, None, 6, 2)
    states = start(folder / "start-1", corpus.url, states[4], 11, 3)
    states = start(folder / "start-2", corpus.url, states[11], 2, 1)
    start(folder / "start-3", corpus.url, states[1], 100, 4)
    start(folder / "quiet", corpus.url, None, 100, 1)
    history = [read_start(folder / f"start-{number}") for number in range(4)]
    return Proof(corpus, history, read_start(folder / "quiet"))


def test_a_true_history_is_proven(true: Proof) -> None:
    verdict = true.of(true.history)
    assert (verdict.exact, verdict.loss_difference) == (True, 0)
    assert (verdict.num_steps, verdict.num_samples) == (EPOCHS * 13, EPOCHS * 200)
    assert verdict.num_substituted == EPOCHS * len(true.corpus.bad) > 0
    assert verdict.num_steps_again == 2 + 1


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_history_with_one_fault_is_not(true: Proof, fault: str, seed: int) -> None:
    assert not prove_resume.proven(true.of(with_fault(true.history, fault, random.Random(seed))))


@pytest.mark.slow
def test_the_history_of_a_mixture_is_proven_unless_it_has_a_fault(tmp_path: Path) -> None:
    corpus = write_mixture(tmp_path / "corpus", 200, 0.05, seed=1)
    states = start(tmp_path / "start-0", corpus.url, None, 47, 2)
    start(tmp_path / "start-1", corpus.url, states[44], 100, 3)
    start(tmp_path / "quiet", corpus.url, None, 100, 1)
    history = [read_start(tmp_path / f"start-{number}") for number in range(2)]
    mixed = Proof(corpus, history, read_start(tmp_path / "quiet"))
    assert prove_resume.proven(mixed.of(history))
    for fault in FAULTS:
        assert not prove_resume.proven(mixed.of(with_fault(history, fault, random.Random(0))))


def test_what_was_lost_and_repeated_is_counted(true: Proof) -> None:
    def counts(fault: str) -> tuple[int, int]:
        verdict = true.of(with_fault(true.history, fault, random.Random(0)))
        return verdict.lost, verdict.repeated

    assert counts("a line is dropped")[0] > 0 == counts("a line is dropped")[1]
    assert counts("a line is repeated")[1] > 0 == counts("a line is repeated")[0]
    assert counts("a step is skipped")[0] > 10
    assert counts("two rows are swapped") == (0, 0)


def test_a_fault_in_a_step_that_was_undone_is_seen_too(true: Proof) -> None:
    *_, undone = true.history[0].lines
    assert undone.number >= true.history[1].resumed
    undone.keys[:2] = undone.keys[1::-1]
    verdict = true.of(true.history)
    undone.keys[:2] = undone.keys[1::-1]
    assert (verdict.different, verdict.lost, verdict.repeated) == (1, 0, 0)


def test_a_step_done_again_counts_as_it_was_done_last(true: Proof) -> None:
    kept = kept_lines(true.history)
    assert [len(kept[0, step]) for step in (3, 4, 5)] == [2, 3, 3]  # ranks of the start that counts


def test_a_loader_that_is_ahead_of_the_weights_has_lost_a_step_whatever_was_logged_before(
    true: Proof,
) -> None:
    assert true.of(true.history[:1] + true.history[2:]).lost > 0
    ahead = copy.deepcopy(true.history)
    ahead[1].resumed -= 1
    assert true.of(ahead).lost > 10


def test_a_loader_that_is_behind_the_weights_has_repeated_a_step(true: Proof) -> None:
    behind = copy.deepcopy(true.history)
    behind[1].resumed += 1
    assert (true.of(behind).lost, true.of(behind).repeated > 10) == (0, True)


def test_a_line_that_a_kill_has_torn_is_no_line(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_text('{"resumed": 70}\n{"epoch": 2, "st')
    assert read_start(tmp_path) == Run(70, [])


CHILD = """
import subprocess, sys
code = "import mmap, time; file = open(sys.argv[1], 'r+b'); " \
       "held = mmap.mmap(file.fileno(), 8); print(flush=True); time.sleep(1000)"
child = subprocess.Popen([sys.executable, "-c", "import sys; " + code, sys.argv[1]],
                         start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print("running", flush=True)
child.wait()
"""


def test_a_process_and_shared_memory_that_outlive_a_start_are_found_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(prove_attempt, "SHARED_MEMORY", memory)
    segment = memory / "torch_segment"
    segment.write_bytes(b"12345678")
    attempt = Attempt([sys.executable, "-c", CHILD, str(segment)], 1, tmp_path)
    try:
        assert wait_until(lambda: (tmp_path / "rank0.err").read_bytes(), 500)
        assert len(attempt.processes()) == 2
        attempt.ranks[0].kill()
        assert wait_until(attempt.all_ended, 500)
        process, path = attempt.remains()
        assert "mmap" in process
        assert path == str(segment)
    finally:
        attempt.clean()
    assert (attempt.remains(), segment.exists()) == ([], False)


def test_the_exit_code_is_that_of_the_proof(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for holds in (True, False):
        monkeypatch.setattr(prove_resume, "prove", lambda *_, holds=holds: {"holds": holds})
        monkeypatch.setattr(sys, "argv", ["resume.py", "--out", str(tmp_path)])
        with pytest.raises(SystemExit) as left:
            prove_resume.main()
        assert left.value.code == (0 if holds else 1)
        assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"holds": holds}


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_loses_and_repeats_nothing(tmp_path: Path) -> None:
    # With this seed: a rank in a checkpoint, a worker in steps, everything at start-up.
    arguments = ["--kills", "3", "--seed", "45", "--ranks", "2", "--workers", "1", "--out"]
    command = [sys.executable, "-m", "tools.prove.resume", *arguments, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed["kills"] == {"rank": 1, "worker": 1, "everything": 1}
    for name in ("lost", "repeated", "unplanned", "different", "mistaken", "num_failed"):
        assert printed[name] == 0, name
    assert printed["left_behind"] == printed["unnoticed_faults"] == []
    assert printed["num_substituted"] > 0
    assert printed["weight_difference"] <= 1e-9

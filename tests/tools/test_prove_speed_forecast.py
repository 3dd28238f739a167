"""The comparison of predicted and real speeds: its structure, and that it can fail. No times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tools.prove import speed_forecast as prove
from tools.prove.speed_forecast import Comparison


def compared(predicted: float, free: float, waiting: float) -> Comparison:
    return Comparison(2, 1, "cpu", predicted, free, 0.002, 0.003, waiting)


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        ([compared(100, 100, 0.0)], True),
        ([compared(100, 86, 0.1), compared(100, 50, 0.9), compared(100, 114, 0.0)], True),
        ([compared(100, 84, 0.0)], False),
        ([compared(100, 116, 0.0)], False),
        ([compared(100, 100, 0.2)], False),
    ],
)
def test_a_comparison_holds_within_15_percent_in_the_median(
    each: list[Comparison], expected: bool
) -> None:
    assert prove.holds(each) is expected


def test_the_table_says_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    prove.print_table({"local": [compared(100, 98, 0.01)], "S3": [compared(100, 50, 0.0)]})
    lines = capsys.readouterr().out.splitlines()
    assert "| local, limit: cpu | 100 | 98 | 0.98 (0.98-0.98) | 1.50 | 1.0% | holds |" in lines
    assert "| S3, limit: cpu | 100 | 50 | 0.50 (0.50-0.50) | 1.50 | 0.0% | FAILS |" in lines


def test_a_run_counts_its_late_steps_and_its_waits(corpus: str) -> None:
    figures = prove.run(corpus, num_workers=0, num_threads=1, num_steps=5, step_s=0.001)
    assert figures["samples_per_s"] > 0
    assert figures["cpu_s"] >= 0
    assert 0 < figures["waiting"] < 1


def test_the_recommended_setting_is_run_freely_and_at_a_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[list[Any]] = []

    def answer(words: Sequence[Any], variables: dict[str, str]) -> dict[str, Any]:
        assert variables == {"A": "b"}
        called.append(list(words))
        if words[1] == "bench":
            cores = {"main_cores": 0.1, "worker_cores": 1.0, "reader_cores": 0.18}
            chosen = {"num_workers": 3, "num_threads": 2, "limit": "storage", **cores}
            return {"samples_per_s": 640.0, "chosen": chosen}
        return {"samples_per_s": 600.0, "cpu_s": 0.003, "waiting": 0.25}

    monkeypatch.setattr(prove, "called", answer)
    comparison = prove.compare("s3://bucket/corpus", {"A": "b"}, 30.0, 400)
    assert comparison == Comparison(
        3, 2, "storage", 640.0, 600.0, pytest.approx(0.002), 0.003, 0.25
    )
    free, paced = (json.loads(words[-1]) for words in called[1:])
    assert free == {
        "url": "s3://bucket/corpus",
        "num_workers": 3,
        "num_threads": 2,
        "num_steps": 400,
    }
    assert paced == free | {"step_s": prove.PACE * prove.BATCH_SIZE / 640.0}

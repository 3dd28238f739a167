"""How full packs are: the report against the plain rule, and on datasets of known faults."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmstream.packing import plan_report as plan_report_module
from mmstream.packing import planner
from mmstream.packing.measure_file import Measure
from mmstream.packing.plan import PackPlan
from mmstream.packing.plan_report import PlanReport, _num_packs, plan_report
from mmstream.packing.planner import best_fit, make_plan
from mmstream.packing.settings import PackLimits
from tests.packing.test_planner import measure_of


def report_of(measure: Measure, limits: PackLimits) -> PlanReport:
    return plan_report(make_plan(measure, limits), measure)


@given(st.lists(st.integers(1, 60), max_size=200), st.integers(60, 90))
def test_the_bound_is_best_fit_decreasing(lengths: list[int], max_tokens: int) -> None:
    costs = np.sort(np.array(lengths, dtype=np.int64))[::-1, None]
    packs = best_fit(costs, np.array([max_tokens]))
    histogram = np.bincount(np.array(lengths, dtype=np.int64))
    assert _num_packs(histogram, max_tokens) == len(set(packs.tolist()))


RNG = np.random.default_rng(5)
TEXTS = np.clip(RNG.lognormal(5.0, 0.9, 60_000), 10, 3000).astype(np.int64)
CORPORA = {
    "captions": (np.clip(RNG.normal(12, 3, 200_000), 5, 60).astype(np.int64), 4096, 0.01),
    "conversations": (TEXTS * 3 + 20, 16384, 0.01),
    "one picture": (TEXTS + 591, 4096, 0.01),
    "one picture, 8k": (TEXTS + 591, 8192, 0.01),
    "pictures": (RNG.integers(1, 7, 20_000) * 576 + TEXTS[:20_000] // 6, 4096, 0.035),
}


@pytest.mark.parametrize("name", CORPORA)
def test_packs_are_nearly_as_full_as_best_fit_decreasing_makes_them(name: str) -> None:
    lengths, max_tokens, most_lost = CORPORA[name]
    counts = [1000] * (lengths.size // 1000)
    report = report_of(measure_of(counts, num_tokens=lengths.tolist()), PackLimits(max_tokens))
    assert report.bound - most_lost <= report.fill <= report.bound


def test_the_limit_that_binds_is_named() -> None:
    measure = measure_of([300], num_tokens=[10] * 300, num_images=[2] * 300)
    report = report_of(measure, PackLimits(100, max_images=4, max_documents=50))
    assert report.binding_limit == "max_images"
    assert report.bound == report.fill == 0.2
    assert report_of(measure, PackLimits(100, max_images=100)).binding_limit == "max_tokens"


def test_other_lengths_are_tried_with_samples_that_are_too_long_now() -> None:
    measure = measure_of([4], num_tokens=[600, 600, 1100, 1100])
    report = report_of(measure, PackLimits(1024))
    assert report.fill == pytest.approx(600 / 1024)
    assert report.other_fills[1152] == pytest.approx((600 + 600 + 1100 + 1100) / (4 * 1152))
    assert [(entry.reason, entry.num_samples, entry.num_tokens) for entry in report.left_out] == [
        ("too long", 2, 2200)
    ]


@pytest.mark.parametrize(("is_sorted", "expected"), [(True, True), (False, False)])
def test_sorted_lengths_are_told(is_sorted: bool, expected: bool) -> None:
    lengths = RNG.integers(10, 900, 2000)
    lengths = np.sort(lengths) if is_sorted else lengths
    report = report_of(measure_of([2000], num_tokens=lengths.tolist()), PackLimits(1024))
    assert report.neighbours_alike is expected
    assert any("reshard" in line for line in report.lines(1024)) is expected


def test_groups_that_an_append_left_short_are_told() -> None:
    first = measure_of([10], num_tokens=[7] * 10)
    measure = measure_of([10, 10], num_tokens=[7] * 20)
    before = make_plan(first, PackLimits(20))
    report = plan_report(make_plan(measure, PackLimits(20), previous=before), measure)
    assert report.num_short_groups == 1
    assert any("--overwrite" in line for line in report.lines(20))


def test_a_plan_without_packs_has_a_report() -> None:
    report = report_of(measure_of([2], num_tokens=[30, 40]), PackLimits(20))
    assert (report.num_packs, report.fill, report.bound, report.num_ranges) == (0, 0.0, 0.0, 0.0)


def test_a_report_of_parts_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = RNG.integers(-1, 700, 1000).tolist()
    measure = measure_of([100] * 10, num_tokens=lengths, num_images=[1] * 1000)
    limits = PackLimits(512, max_images=3, document_multiple_of=4)
    whole = report_of(measure, limits)
    for module in (plan_report_module, planner):
        monkeypatch.setattr(module, "SAMPLES_AT_ONCE", 150)
    assert report_of(measure, limits) == whole
    assert whole.num_samples > 600
    assert whole.num_ranges == pytest.approx(ranges_of(make_plan(measure, limits)))


def ranges_of(plan: PackPlan) -> float:
    """Runs of neighbours a pack, counted pack by pack."""
    stops = [*plan.unit_rows[1:, 0].tolist(), plan.members.size]
    starts = plan.unit_rows[:, 0].tolist()
    runs = [1 + (np.diff(plan.members[a:b]) != 1).sum() for a, b in zip(starts, stops, strict=True)]
    return float(np.mean(runs))

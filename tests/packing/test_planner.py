"""What holds for every plan: each sample in one unit or listed, limits kept, groups that stay.

And reports of how full packs are, against the plain rule and on datasets of known faults, and the
conditions that choose samples.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mmstream.dataset.manifest import ShardInfo
from mmstream.errors import ConfigError
from mmstream.packing import planner
from mmstream.packing.plan import (
    CONDITION,
    ON_BAD_LIST,
    OVER_A_LIMIT,
    TOO_LONG,
    UNUSABLE,
    PackLimits,
    PackPlan,
)
from mmstream.packing.planner import (
    GROUP_PACKS,
    Measure,
    PlanReport,
    best_fit,
    make_plan,
    pack_samples,
    plan_of_lengths,
    plan_report,
)


def measure_of(counts: list[int], **columns: list[int]) -> Measure:
    shards = tuple(
        ShardInfo(f"{number}.tar", count, 10240 + number) for number, count in enumerate(counts)
    )
    return Measure(shards, {name: np.array(values, np.int64) for name, values in columns.items()})


@st.composite
def measures(draw: st.DrawFn) -> Measure:
    """Draw a measure whose groups hold few samples: T is small, and so is 256 T."""
    counts = draw(st.lists(st.integers(0, 120), min_size=1, max_size=12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_samples, longest = sum(counts), draw(st.integers(2, 30))
    return measure_of(
        counts,
        num_tokens=rng.integers(-1, longest, num_samples).tolist(),
        num_label_tokens=rng.integers(0, 5, num_samples).tolist(),
        num_documents=rng.integers(1, 3, num_samples).tolist(),
        num_images=rng.integers(0, 4, num_samples).tolist(),
        patches=rng.integers(0, 100, num_samples).tolist(),
        width=rng.integers(0, 400, num_samples).tolist(),
    )


limits_of_packs = st.builds(
    PackLimits,
    st.sampled_from([4, 8, 12, 20]),
    max_documents=st.none() | st.integers(1, 4),
    max_images=st.none() | st.integers(1, 8),
    max_patches=st.none() | st.integers(50, 200),
    document_multiple_of=st.sampled_from([1, 2, 4]),
    where=st.sampled_from(["", "width >= 200 and num_label_tokens > 1"]),
    overlong=st.sampled_from(["reject", "truncate"]),
)


def positions_of(plan: PackPlan) -> np.ndarray:
    units = plan.units(np.arange(plan.num_units))
    starts = plan.shard_ends - [shard.num_samples for shard in plan.shards]
    return starts[units.shard] + units.index


@settings(deadline=None, max_examples=80)
@given(measures(), limits_of_packs)
def test_each_sample_is_in_one_unit_or_listed_and_units_keep_limits_and_have_sums(
    measure: Measure, limits: PackLimits
) -> None:
    plan = make_plan(measure, limits)
    positions = positions_of(plan)
    everywhere = np.concatenate([positions, plan.left_out[:, 0]])
    assert np.array_equal(np.sort(everywhere), np.arange(measure.num_samples))
    assert np.array_equal(plan.left_out[:, 2], measure.column("num_tokens")[plan.left_out[:, 0]])

    units, sums = plan.units(np.arange(plan.num_units)), plan.sums(np.arange(plan.num_units))
    unit_of = np.repeat(np.arange(plan.num_units), units.counts)
    multiple = limits.document_multiple_of
    padded = units.num_tokens + (multiple - 1) * measure.column("num_documents")[positions]
    costs = np.bincount(unit_of, padded // multiple)
    assert (costs * multiple <= limits.max_tokens).all()
    for values, most in (
        (sums.num_documents, limits.max_documents),
        (sums.num_images, limits.max_images),
        (sums.patches, limits.max_patches),
    ):
        assert most is None or (values <= most).all()

    expected = {
        name: measure.column(name)[positions]
        for name in ("num_images", "patches", "squared_patches", "num_documents")
    }
    expected |= {"num_tokens": units.num_tokens, "squared_tokens": units.num_tokens**2}
    for name, values in expected.items():
        assert np.array_equal(getattr(sums, name), np.bincount(unit_of, values, plan.num_units))


@settings(deadline=None, max_examples=40)
@given(measures(), limits_of_packs, st.data())
def test_appended_shards_change_no_group(
    measure: Measure, limits: PackLimits, data: st.DataObject
) -> None:
    num_shards = data.draw(st.integers(0, len(measure.shards)), label="shards at first")
    num_samples = sum(measure.counts[:num_shards].tolist())
    first = Measure(
        measure.shards[:num_shards],
        {name: column[:num_samples] for name, column in measure.columns.items()},
    )
    before = make_plan(first, limits)
    after = make_plan(measure, limits, previous=before)
    num_groups = before.num_groups
    for name in ("group_stops", "counts", "group_digests", "group_names"):
        assert list(getattr(after, name)[:num_groups]) == list(getattr(before, name))
    np.testing.assert_array_equal(after.unit_rows[: before.num_units], before.unit_rows)
    np.testing.assert_array_equal(after.members[: before.members.size], before.members)
    everywhere = np.concatenate([positions_of(after), after.left_out[:, 0]])
    assert np.array_equal(np.sort(everywhere), np.arange(measure.num_samples))


@settings(deadline=None, max_examples=40)
@given(measures(), limits_of_packs)
def test_a_pack_lies_in_one_group_and_groups_hold_256_packs(
    measure: Measure, limits: PackLimits
) -> None:
    plan = make_plan(measure, limits)
    units = plan.units(np.arange(plan.num_units))
    group_of_shard = np.searchsorted(plan.group_stops, units.shard, side="right")
    group_of_unit = np.repeat(np.arange(plan.num_groups), plan.counts)
    assert np.array_equal(group_of_shard, np.repeat(group_of_unit, units.counts))
    tokens = np.bincount(group_of_shard, units.num_tokens, plan.num_groups)
    multiple = limits.document_multiple_of
    full = GROUP_PACKS * limits.max_tokens
    if multiple == 1:
        assert (tokens[:-1] >= full).all()


def test_a_plan_is_the_same_for_any_number_of_samples_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(4)
    counts = [0, 400, 10, 0, 900, 300, 0]
    measure = measure_of(counts, num_tokens=rng.integers(-1, 18, sum(counts)).tolist())
    bad = np.array([[1, 7], [4, 0], [4, 899], [5, 1]])
    plans = []
    for number in (1, 411, 10_000):
        monkeypatch.setattr(planner, "SAMPLES_AT_ONCE", number)
        plans.append(make_plan(measure, PackLimits(16, max_documents=9), bad=bad))
    assert plans[0].num_groups > 1
    for plan in plans:
        assert plan.group_digests == plans[0].group_digests
        assert plan.left_out.tolist() == plans[0].left_out.tolist()
        on_list = plan.left_out[plan.left_out[:, 1] == ON_BAD_LIST, 0].tolist()
        assert on_list == [7, 410, 1309, 1311]


def test_why_a_sample_is_left_out_is_listed() -> None:
    measure = measure_of(
        [2, 4],
        num_tokens=[-1, 11, 5, 6, 7, 8],
        num_images=[0, 0, 9, 0, 0, 0],
        width=[1, 1, 1, 0, 1, 1],
    )
    plan = make_plan(
        measure, PackLimits(10, max_images=8, where="width > 0"), bad=np.array([[1, 2]])
    )
    assert plan.left_out.tolist() == [
        [0, UNUSABLE, -1],
        [1, TOO_LONG, 11],
        [2, OVER_A_LIMIT, 5],
        [3, CONDITION, 6],
        [4, ON_BAD_LIST, 7],
    ]
    assert plan.units(np.array([0])).index.tolist() == [3]


def test_plain_text_may_be_cut_and_other_samples_may_not() -> None:
    measure = measure_of(
        [4],
        num_tokens=[20, 20, 20, 3],
        num_label_tokens=[19, 7, 19, 2],
        num_images=[0, 0, 1, 0],
    )
    plan = make_plan(measure, PackLimits(10, overlong="truncate"))
    assert plan.left_out[:, :2].tolist() == [[1, TOO_LONG], [2, TOO_LONG]]
    assert plan.sums(np.arange(2)).num_tokens.tolist() == [10, 3]
    assert plan.sums(np.arange(2)).num_label_tokens.tolist() == [9, 2]


def test_settings_decide_the_digest_and_appended_samples_do_not() -> None:
    first = plan_of_lengths([3], [5, 6, 7], PackLimits(10))
    assert plan_of_lengths([3, 1], [5, 6, 7, 8], PackLimits(10)).digest == first.digest
    assert plan_of_lengths([3], [5, 6, 7], PackLimits(11)).digest != first.digest


def test_a_plan_of_other_shards_or_settings_is_not_continued() -> None:
    measure = measure_of([2, 2], num_tokens=[5, 6, 7, 8])
    plan = make_plan(measure, PackLimits(10))
    with pytest.raises(ConfigError, match="a plan of other settings"):
        make_plan(measure, PackLimits(12), previous=plan)
    other = Measure((replace(measure.shards[0], num_bytes=1), measure.shards[1]), measure.columns)
    with pytest.raises(ConfigError, match="is another shard than in the plan"):
        make_plan(other, PackLimits(10), previous=plan)
    fewer = Measure(measure.shards[:1], {"num_tokens": np.array([5, 6])})
    with pytest.raises(ConfigError, match="a plan of 2 shards, and the dataset has 1"):
        make_plan(fewer, PackLimits(10), previous=plan)


def test_checksums_that_come_later_change_no_plan() -> None:
    measure = measure_of([2], num_tokens=[5, 6])
    plan = make_plan(measure, PackLimits(10))
    summed = Measure((replace(measure.shards[0], sha256="ab" * 32),), measure.columns)
    assert make_plan(summed, PackLimits(10), previous=plan).group_digests == plan.group_digests


def slow_best_fit(costs: np.ndarray, limits: np.ndarray, num_open: int, min_room: int) -> list[int]:
    """Pack as the rule says it, without any structure."""
    packs: list[int] = []
    rooms: dict[int, np.ndarray] = {}
    num_packs = 0
    for cost in costs:
        fitting = [pack for pack, room in rooms.items() if (cost <= room).all()]
        if not fitting:
            if len(rooms) == num_open:
                del rooms[min(rooms, key=lambda pack: (rooms[pack][0], pack))]
            rooms[num_packs] = limits.copy()
            fitting, num_packs = [num_packs], num_packs + 1
        best = min(fitting, key=lambda pack: (rooms[pack][0], pack))
        rooms[best] = rooms[best] - cost
        packs.append(best)
        if rooms[best][0] < min_room:
            del rooms[best]
    return packs


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 80), st.integers(1, 5))
def test_a_sample_goes_to_the_fullest_open_pack_that_it_fits(
    seed: int, num_limits: int, num_samples: int, num_open: int
) -> None:
    rng = np.random.default_rng(seed)
    limits = rng.integers(1, 60, num_limits)
    costs = rng.integers(0, limits + 1, (num_samples, num_limits))
    packs = best_fit(costs, limits, num_open, 3)
    assert packs.tolist() == slow_best_fit(costs, limits, num_open, 3)


def test_packs_are_numbered_by_their_first_sample() -> None:
    rng = np.random.default_rng(0)
    packs = pack_samples(rng.integers(1, 60, (3000, 1)), np.array([100]))
    first = [int(np.flatnonzero(packs == pack)[0]) for pack in range(packs.max() + 1)]
    assert first == sorted(first)


# -- how full packs are ---------------------------------------------------------------------------


def report_of(measure: Measure, limits: PackLimits) -> PlanReport:
    return plan_report(make_plan(measure, limits))


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
    costs = np.sort(lengths[: sum(counts)])[::-1, None]
    bound = (
        lengths[: sum(counts)].sum()
        / (best_fit(costs, np.array([max_tokens])).max() + 1)
        / max_tokens
    )
    assert bound - most_lost <= report.fill <= bound


def test_samples_that_are_too_long_are_told() -> None:
    measure = measure_of([4], num_tokens=[600, 600, 1100, 1100])
    report = report_of(measure, PackLimits(1024))
    assert report.fill == pytest.approx(600 / 1024)
    assert [(entry.reason, entry.num_samples, entry.num_tokens) for entry in report.left_out] == [
        ("too long", 2, 2200)
    ]


def test_groups_that_an_append_left_short_are_told() -> None:
    first = measure_of([10], num_tokens=[7] * 10)
    measure = measure_of([10, 10], num_tokens=[7] * 20)
    before = make_plan(first, PackLimits(20))
    report = plan_report(make_plan(measure, PackLimits(20), previous=before))
    assert report.num_short_groups == 1
    assert any("--overwrite" in line for line in report.lines(20))


def test_a_plan_without_packs_has_a_report() -> None:
    report = report_of(measure_of([2], num_tokens=[30, 40]), PackLimits(20))
    assert (report.num_packs, report.fill) == (0, 0.0)


# -- conditions over columns -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("100 <= width < 640", [1, 2]),
        ("width IN (0, 640) or height = 300", [0, 2, 3]),
        ("width / height < 3", [1, 2]),
        ("width / height >= 3", []),
        ("num_documents = 1", [0, 1, 2, 3]),
    ],
)
def test_a_condition_chooses_what_is_packed(condition: str, expected: list[int]) -> None:
    sizes = {"width": [0, 100, 300, 640], "height": [0, 400, 300, 0]}
    plan = make_plan(
        measure_of([1, 3], num_tokens=[5] * 4, **sizes), PackLimits(8, where=condition)
    )
    left_out = [position for position in range(4) if position not in expected]
    assert plan.left_out[:, 0].tolist() == left_out
    assert set(plan.left_out[:, 1].tolist()) <= {CONDITION}


@pytest.mark.parametrize("condition", ["width", "width > ", "width > 'a'", "print(width) > 1"])
def test_limits_refuse_what_is_no_condition_over_integers(condition: str) -> None:
    with pytest.raises(ConfigError, match=r"^where"):
        PackLimits(8, where=condition)


def test_the_digest_of_a_plan_is_of_the_condition_as_it_is_written() -> None:
    where = "width>=200  and not num_images == 0"
    assert (
        planner.plan_digest(PackLimits(20, where=where), "x") == "4c98e896fdda8100d8de7add30c4b41c"
    )

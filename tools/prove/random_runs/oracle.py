"""What must hold for any run, written from docs/guarantees.md alone.

It asks mmstream for nothing but the number of lanes and of packs. What samples there are, what they
hold and which of them are bad is known from the corpora as they were written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import mmstream as mm
from tools.prove.random_runs.corpus import FAULTS, Known, Ref
from tools.prove.random_runs.rows import Content, Record, Row

Steps: TypeAlias = Mapping[tuple[int, int], Mapping[int, Row]]
"""By (epoch, step): the rows of the global batch."""

Groups: TypeAlias = Sequence[tuple[frozenset[Ref], int]]
"""The samples of each bucket, after small ones were joined, and the rows of its steps."""


@dataclass(frozen=True)
class Facts:
    """What the judge knows of a pipeline."""

    samples: Mapping[Ref, Known]
    chosen: frozenset[Ref]
    """Those that the views show."""
    listed: frozenset[Ref]
    source_of: Mapping[int, str]
    """By shard; "" without a mixture."""
    name_of: Mapping[int, str]
    faults: frozenset[str]
    """Those that this pipeline can notice."""
    rows: int
    """G."""
    lanes: tuple[int, int]
    action: str
    drop_last: bool
    shuffle: bool
    keeps_lanes: bool
    num_epochs: int
    span: tuple[int, int] = (0, 400)
    """Samples of each recording that are decoded."""
    weights: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Of a mixture, by the step of the run from which they hold."""
    lane_slack: int = 2
    """Samples that a lane of a mixture may be away from its share."""
    epoch_steps: int | str = 0
    max_tokens: int = 0
    """Of a pack; 0: rows are single samples."""
    num_packs: int = 0
    measured: Mapping[Ref, int] = field(default_factory=dict)
    """Tokens of samples as the plan believes them to be."""
    removed: frozenset[Ref] = frozenset()
    """Those that were taken down, where an earlier plan still has them."""
    repeat: int = 1
    buckets: mm.Buckets | None = None
    """As they were asked for, by `Known.size`."""

    def fault_of(self, ref: Ref) -> str:
        """Return what is bad about a sample; "" where nothing is that this pipeline looks at."""
        fault = "taken down" if ref in self.removed else self.samples[ref].fault
        return fault if fault in self.faults else ""

    @property
    def planned(self) -> list[Ref]:
        """The samples that each epoch plans."""
        refs = sorted(self.chosen - self.listed)
        if self.max_tokens:
            return [ref for ref in refs if self.measured[ref] <= self.max_tokens]
        return refs


def judge(facts: Facts, steps: Steps) -> None:
    """Look at whole epochs of a run.

    Raises:
        AssertionError: a promise is broken; the message says where.
    """
    if facts.buckets is not None:
        for of_bucket, its_steps in _by_bucket(facts, steps):
            judge(of_bucket, its_steps)
        return
    for (epoch, step), rows in steps.items():
        assert sorted(rows) == list(range(facts.rows)), f"step {step} lacks rows"
        for number, row in rows.items():
            where = f"epoch {epoch} step {step} row {number}"
            assert row.repeat == facts.repeat, f"{where}: {row.repeat} times"
            for ref in row.planned + row.shown:
                assert ref in facts.chosen, f"{where}: {ref} is not chosen"
                assert ref not in facts.listed, f"{where}: {ref} is on the bad list"
            (_judge_pack if facts.max_tokens else _judge_row)(facts, row, where)
    if facts.max_tokens:
        _judge_packs(steps)
    by_epoch: dict[int, list[Mapping[int, Row]]] = defaultdict(list)
    for (epoch, step), rows in sorted(steps.items()):
        assert step == len(by_epoch[epoch]), f"epoch {epoch} lacks step {len(by_epoch[epoch])}"
        by_epoch[epoch].append(rows)
    assert len(by_epoch) == facts.num_epochs
    if facts.weights:
        _judge_mixture(facts, by_epoch)
        return
    for epoch, of_epoch in by_epoch.items():
        _judge_epoch(facts, epoch, of_epoch)
    _judge_shuffle(facts, by_epoch)


def groups_of(facts: Facts) -> Groups:
    """Return what docs/buckets.md says of buckets; [] without them."""
    buckets: Any = facts.buckets
    if buckets is None:
        return []
    refs: dict[int, set[Ref]] = defaultdict(set)
    for ref in facts.planned:
        size = facts.samples[ref].size
        if size is not None and size <= buckets.edges[-1]:
            refs[bisect_left(buckets.edges, size)].add(ref)
    rows = buckets.rows or {buckets.edges[-1]: facts.rows}
    rows_of = [rows[min(key for key in rows if key >= edge)] for edge in buckets.edges]

    def is_small(group: list[int]) -> bool:
        least = buckets.min_steps * rows_of[max(group, default=0)]
        return bool(sum(len(refs[number]) for number in group) < least)

    groups: list[list[int]] = [[]]
    for number in sorted(refs):
        groups[-1].append(number)
        if not is_small(groups[-1]):
            groups.append([])
    while len(groups) > 1 and is_small(groups[-1]):
        groups[-2:] = [groups[-2] + groups[-1]]
    return [
        (frozenset().union(*map(refs.__getitem__, group)), rows_of[group[-1]]) for group in groups
    ]


def _by_bucket(facts: Facts, steps: Steps) -> Iterator[tuple[Facts, Steps]]:
    """Yield what the judge knows of each bucket alone, and its steps, numbered from 0."""
    groups, num_steps = groups_of(facts), Counter(epoch for epoch, _ in steps)
    of_groups: list[dict[tuple[int, int], Mapping[int, Row]]] = [{} for _ in groups]
    numbers = Counter[tuple[int, int]]()
    for (epoch, step), rows in sorted(steps.items()):
        ref = rows[0].planned[0]
        number = next((n for n, (refs, _) in enumerate(groups) if ref in refs), None)
        assert number is not None, f"epoch {epoch} step {step}: {ref} is in no bucket"
        of_groups[number][epoch, numbers[epoch, number]] = rows
        numbers[epoch, number] += 1
    assert sorted(steps) == [(e, n) for e in sorted(num_steps) for n in range(num_steps[e])]
    for (epoch, number), total in numbers.items():
        share, count = total / num_steps[epoch], 0
        for step in range(num_steps[epoch]):
            count += steps[epoch, step] is of_groups[number].get((epoch, count))
            assert abs(count - (step + 1) * share) <= 1 + len(groups) * share, (
                f"epoch {epoch}: {count} steps of a bucket up to step {step}"
            )
    for (refs, num_rows), of_group in zip(groups, of_groups, strict=True):
        yield replace(facts, chosen=refs, rows=num_rows, buckets=None), of_group


def judge_rest(facts: Facts, steps: Steps, before: Steps, groups: Groups = ()) -> None:
    """Judge the steps of an earlier plan behind a takedown.

    Args:
        facts: with all that was taken down, and `drop_last`, because no row becomes padding.
        steps: these steps.
        before: what they would have shown.
        groups: as the plan has them.

    Raises:
        AssertionError: as `judge`.
    """
    assert sorted(steps) == sorted(before), f"steps {sorted(steps)}, not {sorted(before)}"
    whole = facts
    for (epoch, step), rows in steps.items():
        of_step = [refs for refs, _ in groups if refs & set(rows[0].planned)]
        facts = replace(whole, chosen=of_step[0]) if groups else whole
        for number, old in before[epoch, step].items():
            row, where = rows[number], f"epoch {epoch} step {step} row {number}"
            assert row.planned == old.planned, f"{where}: plans {row.planned}, not {old.planned}"
            wrong = set(row.shown) - facts.chosen | set(row.shown) & (facts.listed | facts.removed)
            assert not wrong, f"{where}: shows {wrong}"
            if not _counted({0: old}) or facts.removed.isdisjoint(old.planned + old.shown):
                assert row == old, f"{where} has changed:\n  {row}\n  {old}"
            else:
                (_judge_pack if facts.max_tokens else _judge_row)(facts, row, where)


def _judge_shuffle(facts: Facts, by_epoch: Mapping[int, Sequence[Mapping[int, Row]]]) -> None:
    """Judge that epochs differ, and that lanes keep their samples where they should."""
    if facts.shuffle and len(by_epoch) > 1 and len(_plan(by_epoch[0])) > 100:
        assert _plan(by_epoch[0]) != _plan(by_epoch[1]), "two epochs are the same"
    if not facts.shuffle and len(by_epoch) > 1:
        assert _plan(by_epoch[0]) == _plan(by_epoch[1]), "epochs differ without shuffle"
    if facts.keeps_lanes:
        _judge_lanes(facts, by_epoch)


def _judge_packs(steps: Steps) -> None:
    """Judge that a sample is in the same pack in every epoch."""
    packs: dict[Ref, tuple[Ref, ...]] = {}
    for rows in steps.values():
        for row in rows.values():
            for ref in row.planned:
                assert packs.setdefault(ref, row.planned) == row.planned, "a pack has changed"


def _plan(of_epoch: Sequence[Mapping[int, Row]]) -> list[tuple[Ref, ...]]:
    return [rows[number].planned for rows in of_epoch for number in sorted(rows)]


def _judge_row(facts: Facts, row: Row, where: str) -> None:
    """Judge a row of one sample."""
    (planned,) = row.planned
    shown = row.shown[0] if row.valid else planned
    fault = facts.fault_of(planned)
    is_padding = not row.valid and not row.records
    if is_padding:
        assert not facts.drop_last, f"{where}: padding"
        return
    if fault:
        (record,) = row.records
        assert record.kind in FAULTS[fault], f"{where}: {fault} is recorded as {record.kind}"
        _judge_substitute(facts, row, record, where)
    else:
        assert row.valid, f"{where}: a good sample is not valid"
        assert (shown, row.records) == (planned, ()), f"{where}: a good sample was replaced"
    if row.valid:
        _judge_content(facts, shown, row.contents[0], where)


def _judge_substitute(facts: Facts, row: Row, record: Record, where: str) -> None:
    """Judge what a row shows in the place of a bad sample."""
    (planned,) = row.planned
    assert record.planned == planned, f"{where}: a record of another sample"
    if facts.action == "mask":
        assert not row.valid, f"{where}: not masked"
    if not row.valid:
        assert record.substitute is None, f"{where}: a substitute of an invalid row"
        is_expected = facts.action == "mask" or _is_poor(facts, planned)
        assert is_expected, f"{where}: no substitute was found"
        return
    (shown,) = row.shown
    assert record.substitute == shown, f"{where}: another substitute is recorded"
    assert shown != planned, f"{where}: its own substitute"
    assert not facts.fault_of(shown), f"{where}: a bad substitute"
    one, other = facts.source_of[planned[0]], facts.source_of[shown[0]]
    assert one == other, f"{where}: a substitute of another source"


def _is_poor(facts: Facts, ref: Ref) -> bool:
    """Tell whether so many samples of a source are bad that 16 draws may find no good one."""
    source = facts.source_of[ref[0]]
    refs = [ref for ref in facts.planned if facts.source_of[ref[0]] == source]
    num_good, limit = sum(not facts.fault_of(ref) for ref in refs), 0.75 if facts.removed else 0.5
    return num_good <= limit * len(refs) or len(refs) < 8


def _judge_pack(facts: Facts, row: Row, where: str) -> None:
    """Judge a row of several samples."""
    assert row.valid == bool(row.shown), f"{where}: valid says {row.valid} of {row.shown}"
    num_measured = sum(facts.measured[ref] for ref in row.planned)
    assert num_measured <= facts.max_tokens, f"{where}: {num_measured} tokens were planned"
    assert len({facts.source_of[ref[0]] for ref in row.planned}) <= 1, f"{where}: mixed sources"
    num_tokens = sum(facts.samples[ref].num_tokens for ref in row.shown)
    assert num_tokens <= facts.max_tokens, f"{where}: {num_tokens} tokens"
    recorded = {record.planned: record for record in row.records}
    assert len(recorded) == len(row.records), f"{where}: a sample is recorded twice"
    assert recorded.keys() <= set(row.planned), f"{where}: records of other samples"
    has_grown = any(facts.samples[r].num_tokens > facts.measured[r] for r in row.planned)
    for ref in row.planned:
        fault = facts.fault_of(ref)
        record = recorded.get(ref)
        if fault:
            assert record is not None, f"{where}: {fault} of {ref} is not recorded"
            assert record.kind in FAULTS[fault], f"{where}: {fault} is recorded as {record.kind}"
        elif record is not None:
            is_too_long = has_grown and record.kind == "LengthError"
            assert is_too_long, f"{where}: {record} of a good sample"
    kept = tuple(ref for ref in row.planned if ref not in recorded)
    if kept:
        assert row.shown == kept, f"{where}: shows {row.shown} of {row.planned}"
        assert not any(record.substitute for record in row.records), f"{where}: a substitute"
    elif row.planned and row.shown:
        assert facts.action == "substitute", f"{where}: a substitute with {facts.action}"
        assert not set(row.shown) & set(row.planned), f"{where}: its own substitute"
        assert not any(map(facts.fault_of, row.shown)), f"{where}: a bad substitute"
        sources = {facts.source_of[ref[0]] for ref in row.planned + row.shown}
        assert len(sources) == 1, f"{where}: a substitute of another source"
        assert {record.substitute for record in row.records} == {row.shown[0]}, where
    else:
        assert not row.shown, f"{where}: padding shows {row.shown}"
    for ref, content in zip(row.shown, row.contents, strict=True):
        _judge_content(facts, ref, content, where)


def _judge_content(facts: Facts, ref: Ref, content: Content, where: str) -> None:
    known = facts.samples[ref]
    assert content.key == known.key, f"{where}: key {content.key} of {ref}"
    assert content.number == known.number, f"{where}: number {content.number} of {ref}"
    assert content.source == facts.source_of[ref[0]], f"{where}: source {content.source}"
    assert content.shard == facts.name_of[ref[0]], f"{where}: shard {content.shard}"
    if "utf8" in facts.faults or known.fault != "utf8":
        assert content.text in (None, known.text), f"{where}: text {content.text} of {ref}"
    if content.tokens is not None:
        assert len(content.tokens) == known.num_tokens, f"{where}: {len(content.tokens)} tokens"
    if content.wav is not None:
        start, stop = facts.span
        first, last = ((known.number * 7 + i) % 30000 for i in (start, stop - 1))
        assert content.wav == (first, last, stop - start), f"{where}: sound {content.wav}"


def _counted(rows: Mapping[int, Row]) -> list[Row]:
    """Return the rows of a step that are not padding."""
    return [row for row in rows.values() if row.valid or row.records]


def _judge_epoch(facts: Facts, epoch: int, of_epoch: Sequence[Mapping[int, Row]]) -> None:
    """Judge the promise: each sample exactly once."""
    refs = facts.planned
    num_units = facts.num_packs or len(refs)
    full, rest = divmod(num_units, facts.rows)
    expected = full if facts.drop_last else full + bool(rest)
    assert len(of_epoch) == expected, f"epoch {epoch}: {len(of_epoch)} steps, not {expected}"
    counts = [len(_counted(rows)) for rows in of_epoch]
    wanted = [facts.rows] * full + ([rest] if rest and not facts.drop_last else [])
    assert counts == wanted, f"epoch {epoch}: rows of steps {counts}, not {wanted}"
    times = Counter(ref for rows in of_epoch for row in _counted(rows) for ref in row.planned)
    twice = [ref for ref, count in times.items() if count > 1]
    assert not twice, f"epoch {epoch}: planned twice: {twice[:5]}"
    assert times.keys() <= set(refs), f"epoch {epoch}: {sorted(times.keys() - set(refs))[:5]}"
    if not facts.drop_last or not rest:
        lost = sorted(set(refs) - times.keys())
        assert not lost, f"epoch {epoch}: lost {lost[:5]}"
    elif not facts.max_tokens:
        assert len(times) == full * facts.rows, f"epoch {epoch}: {len(times)} samples"
    if not facts.shuffle and not facts.max_tokens:
        whole = [row.planned[0] for rows in of_epoch[:full] for _, row in sorted(rows.items())]
        assert whole == refs[: full * facts.rows], f"epoch {epoch}: not the order of the shards"


def _judge_lanes(facts: Facts, by_epoch: Mapping[int, Sequence[Mapping[int, Row]]]) -> None:
    """Judge that no sample is ever in another lane: Q lanes give G / Q rows each to a step."""
    lane_of: dict[Ref, int] = {}
    num_rows = facts.rows // facts.lanes[1]
    for of_epoch in by_epoch.values():
        for rows in of_epoch:
            if any(not row.valid and not row.records for row in rows.values()):
                continue  # the samples left over are spread over the rows
            for number, row in rows.items():
                for ref in row.planned:
                    lane = number // num_rows
                    assert lane_of.setdefault(ref, lane) == lane, f"{ref} has changed its lane"


def _judge_mixture(facts: Facts, by_epoch: Mapping[int, Sequence[Mapping[int, Row]]]) -> None:
    """Judge the proportions, and that each source delivers its samples once in its epochs."""
    if isinstance(facts.epoch_steps, int):
        for epoch, of_epoch in by_epoch.items():
            assert len(of_epoch) == facts.epoch_steps, f"epoch {epoch}: {len(of_epoch)} steps"
    due, given = Counter[str](), Counter[str]()
    seen: dict[tuple[Ref, int], str] = {}
    slack = facts.lane_slack * facts.lanes[0] * facts.lanes[1]
    steps = [rows for epoch in sorted(by_epoch) for rows in by_epoch[epoch]]
    for step, rows in enumerate(steps):
        weights = facts.weights[max(first for first in facts.weights if first <= step)]
        total = sum(weights.values())
        for name, weight in weights.items():
            due[name] += facts.rows * weight / total  # type: ignore[assignment]
        for number, row in rows.items():
            source = facts.source_of[row.planned[0][0]]
            given[source] += 1
            assert weights[source], f"step {step} row {number}: {source} has no weight"
            for content in row.contents[:1]:
                for ref in row.planned:
                    before = seen.setdefault((ref, content.epoch), f"step {step} row {number}")
                    assert before == f"step {step} row {number}", f"{ref}: {before} and {step}"
        for name in due if not facts.max_tokens else ():
            difference = abs(due[name] - given[name])
            assert difference < slack, f"step {step}: {name} is {difference} from its share"
    last = {facts.source_of[ref[0]]: epoch for ref, epoch in sorted(seen, key=lambda one: one[1])}
    good = [ref for ref in facts.planned if not facts.max_tokens and not facts.fault_of(ref)]
    lost = [  # the last two epochs of a source may not be over
        (ref, epoch)
        for ref in good
        for epoch in range(last.get(facts.source_of[ref[0]], 0) - 1)
        if (ref, epoch) not in seen
    ]
    assert not lost, f"lost of epochs of sources: {lost[:5]}"

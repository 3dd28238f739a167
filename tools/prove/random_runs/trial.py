"""One random trial: a pipeline over random corpora, read once in peace and once on random machines.

The first read is judged by the documentation (`oracle`). Every later part of it has other ranks,
workers, threads and storage, ends in another way, and must show the same rows.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import mmstream as mm
from mmstream.audit import replay
from mmstream.dataset.bad_list import take_down
from mmstream.packing.plan import PackLimits, PackPlan
from mmstream.packing.planner import Measure, make_plan
from mmstream.state import order_of_state, state_at
from mmstream.train.tokenizer import byte_tokenizer
from mmstream.types import Batch
from tools.prove.random_runs.corpus import (
    FAULTS,
    WAV_RATE,
    Corpus,
    Known,
    Ref,
    Union,
    grow,
    write_corpus,
)
from tools.prove.random_runs.oracle import Facts, Groups, groups_of, judge, judge_rest
from tools.prove.random_runs.rows import Row, marked, rows_of
from tools.prove.random_runs.views import MAX_CHOSEN, Choice, chosen, draw_view, opened

Steps = dict[tuple[int, int], dict[int, Row]]

ENDS = ("close", "leave", "jump", "kill", "take none", "look ahead")
"""How a part of a run ends. "take none": it is loaded and asked for a batch that never counts."""


@dataclass
class Trial:
    """What is drawn for a trial, and what it has counted."""

    seed: int
    num_epochs: int = 2
    s3_prefix: str = ""
    choose: random.Random = field(default_factory=random.Random)
    """Draws all that is about views and takedowns."""
    kinds: random.Random = field(init=False)
    """Draws all that is about buckets, repeats and unions."""
    live: dict[int, dict[str, int]] = field(default_factory=dict)
    """Weights that are set during a run, after so many of its steps."""
    ended: dict[str, Any] = field(default_factory=dict)
    """The state at the end of the last read in peace."""
    groups: dict[int, Groups] = field(default_factory=dict)
    """By epoch: the samples of each bucket, as its plan has them."""
    removed: set[Ref] = field(default_factory=set)
    """What was taken down, of all sources."""
    words: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.kinds = random.Random(f"new {self.seed}")

    def set_weights(self, loader: mm.Loader) -> None:
        """Set the weights that are due after the last batch."""
        if not self.live:
            return
        state = loader.state_dict()
        run_step = state["epoch"] * len(loader) + state["step"]
        if run_step in self.live:
            loader.set_weights(self.live[run_step])
            self.counts["weights set"] += 1

    def say(self, *words: object) -> None:
        """Remember what was drawn, for the message of a failure."""
        self.words.append(" ".join(map(str, words)))


@dataclass(frozen=True)
class Data:
    """Corpora, and how they are decoded."""

    corpora: dict[str, Corpus]
    """By source; one named "" without a mixture."""
    mixture: dict[str, Any] | None
    decode: mm.Decode | None
    batching: mm.Flat | mm.Buckets | None
    """Buckets with `rows`: those above the first edge have half of the rows."""
    is_before: bool
    """Whether the function that refuses samples runs before decoding."""
    span: tuple[int, int]
    action: str
    understated: frozenset[Ref]
    """Samples of packs that are longer than measured."""
    max_tokens: int
    views: Mapping[str, tuple[Choice, ...]] = field(default_factory=dict)
    """By source. Absent: all samples."""

    def open(self, storage_kind: str = "local") -> mm.Dataset | mm.Mixture:
        """Open the dataset or the mixture."""
        datasets = {
            name: opened(corpus.open(storage_kind), self.views.get(name, ()))
            for name, corpus in self.corpora.items()
        }
        if self.mixture is None:
            return datasets[""]
        weights = self.mixture["weights"][0]
        settings = {name: self.mixture[name] for name in ("stop", "epoch_steps", "changes")}
        return mm.Mixture({name: (datasets[name], weights[name]) for name in datasets}, **settings)

    def pipeline(
        self, settings: Mapping[str, Any], storage_kind: str = "local", **cache: Any
    ) -> mm.Pipeline:
        """Return the pipeline with these settings of the order."""
        is_clean = not self.understated and all(
            known.fault in ("", "filtered") for known in self.samples().values()
        )
        functions = {"before" if self.is_before else "transforms": (marked,)}
        num_samples = settings["global_batch_size"]
        return mm.Pipeline(
            self.open(storage_kind),
            decode=self.decode,
            batching=self.batching_of(num_samples),
            bad_samples=mm.BadSamplePolicy(
                action=self.action,  # type: ignore[arg-type]
                max_fraction=1,
                max_length_error_fraction=1,
                max_consecutive=int(is_clean),
                max_samples=0 if is_clean else None,
                shards=True,
                quarantine=None,
            ),
            **functions,  # type: ignore[arg-type]
            **{**settings, "global_batch_size": num_samples * settings.get("repeat", 1)},
            **cache,
        )

    def batching_of(self, num_samples: int) -> mm.Flat | mm.Buckets | None:
        """Return the batching, with plans of the corpora as they are now."""
        if isinstance(self.batching, mm.Buckets) and self.batching.rows is not None:
            half = 1 if num_samples % 2 else num_samples // 2
            first, *_, last = self.batching.edges
            return replace(self.batching, rows={first: num_samples, last: half})  # type: ignore[dict-item]
        if not isinstance(self.batching, mm.Pack):
            return self.batching
        plans = {name: self._plan(name) for name in self.corpora}
        return replace(self.batching, plan=plans[""] if self.mixture is None else plans)

    def _plan(self, name: str) -> PackPlan:
        corpus, first = self.corpora[name], self.first_shard(name)
        lengths = [self.measured((first + s, i)) for s, i in sorted(corpus.samples)]
        tokens = np.array(lengths, dtype=np.int64)
        columns = {"num_tokens": tokens, "num_label_tokens": tokens - 1}
        bad = np.array(sorted(corpus.listed), dtype=np.int64).reshape(-1, 2)
        limits = PackLimits(self.max_tokens)
        return make_plan(Measure(tuple(corpus.shards), columns), limits, bad=bad)

    def first_shard(self, name: str) -> int:
        """Return the number of a source's first shard among those of all sources."""
        names = list(self.corpora)
        return sum(len(self.corpora[other].names) for other in names[: names.index(name)])

    def samples(self) -> dict[Ref, Known]:
        """Return all samples, numbered over all sources."""
        return {
            (self.first_shard(name) + shard, index): known
            for name, corpus in self.corpora.items()
            for (shard, index), known in corpus.samples.items()
        }

    def chosen(self) -> dict[str, list[Ref]]:
        """Return the samples of each source that its view shows, as the corpora are now."""
        return {
            name: chosen(self.views.get(name, ()), corpus.shown)
            for name, corpus in self.corpora.items()
        }

    def measured(self, ref: Ref) -> int:
        """Return the tokens of a sample as the plan believes them to be."""
        return self.samples()[ref].num_tokens - 3 * (ref in self.understated)

    def shard_names(self) -> list[str]:
        """Return the names of all shards, as records show them."""
        return [
            f"{name}/{shard}" if name else shard
            for name, corpus in self.corpora.items()
            for shard in corpus.names
        ]

    def facts(self, trial: Trial, pipeline: mm.Pipeline) -> Facts:
        """Return what the judge may know."""
        samples, names = self.samples(), self.shard_names()
        text = None if self.decode is None else self.decode.text
        audio = None if self.decode is None else self.decode.audio
        blind = {"utf8"} if text is None else set()
        blind |= {"wav"} if audio is None else set()
        listed, removed = (
            frozenset(
                (self.first_shard(name) + shard, index)
                for name, corpus in self.corpora.items()
                for shard, index in getattr(corpus, kind)
            )
            for kind in ("listed", "removed")
        )
        measured = {ref: known.num_tokens for ref, known in samples.items()}
        measured |= {ref: measured[ref] - 3 for ref in self.understated}
        is_packed = isinstance(self.batching, mm.Pack)
        order = pipeline.order
        weights = {} if self.mixture is None else self.mixture["weights"]
        if trial.live:  # they take the place of all that are declared behind them
            begun = {step: shares for step, shares in weights.items() if step < min(trial.live)}
            weights = begun | trial.live
        return Facts(
            samples=samples,
            chosen=frozenset(
                (self.first_shard(name) + shard, index)
                for name, refs in self.chosen().items()
                for shard, index in refs
            ),
            listed=listed,
            removed=removed,
            source_of=dict(enumerate(s for s, c in self.corpora.items() for _ in c.names)),
            name_of={n: name.rpartition("/")[2] for n, name in enumerate(names)},
            faults=frozenset(FAULTS.keys() - blind),
            rows=pipeline.global_batch_size // pipeline.repeat,
            lanes=order.grid,
            action=self.action,
            drop_last=pipeline.drop_last or self.mixture is not None,
            shuffle=pipeline.shuffle,
            keeps_lanes=pipeline.reshuffle == "lanes" and self.mixture is None,
            num_epochs=trial.num_epochs,
            span=self.span,
            weights=weights,
            lane_slack=3 if trial.live else 2,
            epoch_steps="" if self.mixture is None else self.mixture["epoch_steps"] or "stop",
            max_tokens=self.max_tokens if is_packed else 0,
            num_packs=getattr(order, "num_units", 0) if self.mixture is None else 0,
            measured=measured,
            repeat=pipeline.repeat,
            buckets=pipeline.batching if isinstance(pipeline.batching, mm.Buckets) else None,
        )


@dataclass(frozen=True)
class Plan:
    """What is read in an epoch."""

    data: Data
    settings: dict[str, Any]
    chosen: dict[str, list[Ref]]
    """By source."""
    num_shards: int
    """Of all sources."""


def run_trial(
    folder: Path,
    seed: int,
    *,
    remote: float = 0.1,
    workers: float = 0.2,
    s3_prefix: str = "",
) -> Trial:
    """Run a trial.

    Args:
        folder: an empty one.
        seed: of all draws.
        remote: share of the parts of runs that read as from a network, by a reader process.
        workers: share of the parts that have worker processes.
        s3_prefix: URL of a folder of an object store. Then half of those parts read from there.

    Raises:
        AssertionError: a promise is broken. The message has all that was drawn.
    """
    trial = Trial(seed, s3_prefix=s3_prefix, choose=random.Random(f"views {seed}"))
    try:
        _run(trial, folder, random.Random(seed), remote, workers)
    except Exception as error:
        text = "; ".join(trial.words)
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\n  {text}") from error
    return trial


def _run(trial: Trial, folder: Path, draw: random.Random, remote: float, workers: float) -> None:
    data = _draw_data(trial, folder, draw)
    data, settings = _draw_settings(trial, draw, data)
    if data.pipeline(settings).order.steps_per_epoch == 0:
        return
    shard_of = {name: number for number, name in enumerate(data.shard_names())}
    plans = [Plan(data, settings, data.chosen(), len(shard_of))]
    expected = _judged(trial, plans[0], shard_of)
    if expected and data.mixture is None and draw.random() < (0.6 if data.views else 0.3):
        plans.append(_change(trial, draw, plans[0]))
        shard_of |= {name: number for number, name in enumerate(data.shard_names())}
        expected = _with_change(trial, plans[0], plans[1], expected, shard_of)
    if expected:
        _read_in_parts(trial, folder, draw, plans, expected, shard_of, remote, workers)


# -- what is drawn -------------------------------------------------------------------------------


def _draw_data(trial: Trial, folder: Path, draw: random.Random) -> Data:
    is_mixture = draw.random() < 0.3
    kind = draw.choice(["raw", "rows", "flat", "pack", "pack"])
    names = ["a", "b", "c"][: draw.randint(2, 3)] if is_mixture else [""]
    has_wavs = kind != "pack" and draw.random() < 0.25
    bad_fraction = draw.choice([0.0, 0.05, 0.2])
    has_views = kind != "pack" and trial.choose.random() < 0.7
    has_buckets = not is_mixture and kind in ("raw", "rows") and trial.kinds.random() < 0.6
    corpora = {
        name: write_corpus(
            folder / (name or "data"),
            draw,
            prefix=name,
            has_wavs=has_wavs,
            bad_fraction=bad_fraction,
            max_samples=trial.choose.choice([24, 24, 700]) if has_views else 24,
            has_columns=has_buckets,
        )
        for name in names
    }
    for name in [name for name in names if trial.kinds.random() < 0.3]:
        corpora[name] = union = Union(
            folder, has_wavs=has_wavs, has_columns=has_buckets, parts=[corpora[name]]
        )
        union.add(trial.kinds, name, bad_fraction)
        trial.counts["unions"] += 1
    if is_mixture and has_views and trial.choose.random() < 0.3:  # two views of one dataset
        corpora[names[-1]] = corpora[names[0]]
    views = _draw_views(trial, corpora) if has_views else {}
    max_tokens = draw.choice([64, 70, 100, 200])
    layout: Any = draw.choice(["flat", "rows"])
    batching: mm.Flat | mm.Buckets | None = _draw_buckets(trial) if has_buckets else None
    if kind == "flat":
        batching = mm.Flat(layout=layout)
    if kind == "pack":
        batching = mm.Pack(
            max_tokens,
            layout=layout,
            weights_of=draw.choice(["samples", "tokens"]) if is_mixture else None,
            cost=mm.Cost(tokens=1, squared_tokens=1) if draw.random() < 0.5 else None,
            deal=draw.choice(["auto", "all", "off"]),
        )
    decode, span = None, (0, 400)
    if kind != "raw":
        audio = None
        if has_wavs:
            span = draw.choice([(0, 400), (40, 200), (160, 161)])
            seconds = (span[0] / WAV_RATE, span[1] / WAV_RATE)
            audio = mm.AudioDecoder(sample_rate=None, span=None if span == (0, 400) else seconds)
        decode = mm.Decode(
            text=mm.TextDecoder(byte_tokenizer(), max_length=1000),
            audio=audio,
            min_lazy_bytes=draw.choice([1, 300, None, 8 << 20]) if has_wavs else 8 << 20,
        )
    mixture = None
    if is_mixture:
        epoch_steps = draw.choice([None, draw.randint(1, 9)])
        weights = {0: {name: draw.randint(1, 9) for name in names}}
        if epoch_steps and draw.random() < 0.4:
            first = draw.randint(1, 2 * epoch_steps)
            weights[first] = {name: draw.randint(0, 5) for name in names}
            weights[first][names[0]] += 1
        stop = None if epoch_steps else draw.choice(["first", "all"])
        changes = {step: shares for step, shares in weights.items() if step} or None
        mixture = {"weights": weights, "stop": stop, "epoch_steps": epoch_steps, "changes": changes}
        trial.live = _draw_live(trial, names, 0 if kind == "pack" else epoch_steps or 0)
    data = Data(
        corpora,
        mixture,
        decode,
        batching,
        draw.random() < 0.5,
        span,
        draw.choice(["substitute", "mask"]),
        frozenset(),
        max_tokens,
        views,
    )
    if kind == "pack" and draw.random() < 0.3:
        refs = sorted(ref for ref, known in data.samples().items() if known.num_tokens <= 50)
        data = replace(data, understated=frozenset(draw.sample(refs, len(refs) // 10)))
    trial.say(kind, {name: [s.num_samples for s in c.shards] for name, c in corpora.items()})
    trial.say(
        "bad", bad_fraction, "wavs", has_wavs, span, mixture, batching, "before", data.is_before
    )
    trial.say(data.action, "understated", sorted(data.understated), "views", views)
    trial.say("weights that are set", trial.live)
    words = "views of " * bool(views), "buckets of " * has_buckets, kind
    trial.counts["".join(words) + " of a mixture" * is_mixture] += 1
    return data


def _draw_live(trial: Trial, names: Sequence[str], epoch_steps: int) -> dict[int, dict[str, int]]:
    """Return weights that are set in a run. 0 steps: they cannot be set."""
    draw, possible = random.Random(f"live {trial.seed}"), range(1, trial.num_epochs * epoch_steps)
    steps = draw.sample(possible, min(draw.randint(0, 4), len(possible)))
    live = {step: {name: draw.choice([0, 1, 3, 9]) for name in names} for step in sorted(steps)}
    return {step: shares | {draw.choice(names): 2} for step, shares in live.items()}


def _draw_buckets(trial: Trial) -> mm.Buckets:
    draw = trial.kinds
    edges: Any = sorted(draw.sample([8, 11, 12, 15, 20, 30, 45, 60], draw.randint(1, 4)))
    rows = {edges[-1]: 1} if len(edges) > 1 and draw.random() < 0.4 else None
    return mm.Buckets("json.size", edges=edges, rows=rows, min_steps=draw.choice([1, 2, 4]))


def _draw_views(trial: Trial, corpora: Mapping[str, Corpus]) -> dict[str, tuple[Choice, ...]]:
    """Draw a view of most datasets, and of all large ones."""
    return {
        name: draw_view(trial.choose, corpus)
        for name, corpus in corpora.items()
        if len(corpus.samples) > MAX_CHOSEN or trial.choose.random() < 0.8
    }


def _draw_settings(trial: Trial, draw: random.Random, data: Data) -> tuple[Data, dict[str, Any]]:
    rows = draw.randint(1, 12)
    shuffle = draw.random() < 0.85
    settings: dict[str, Any] = {
        "global_batch_size": rows,
        "seed": draw.choice([0, -5, draw.randint(0, 1 << 70)]),
        "shuffle": shuffle,
        "drop_last": draw.random() < 0.5,
        "reshuffle": draw.choice(["global", "lanes"]) if shuffle else "global",
    }
    if data.batching is None and trial.kinds.random() < 0.4:
        settings["repeat"] = trial.kinds.randint(2, 4)
    if draw.random() < 0.7:
        lanes = draw.choice([n for n in range(1, rows + 1) if rows % n == 0])
        settings["grid"] = (draw.randint(1, 3), lanes)
    if draw.random() < 0.4:
        settings["window"] = draw.randint(1, 30)
    elif draw.random() < 0.5:
        settings["window_bytes"] = draw.choice([1, 5_000, 100_000, 1 << 30])
    data, settings = _possible(trial, data, settings)
    trial.say(settings, data.batching)
    return data, settings


def _possible(trial: Trial, data: Data, settings: dict[str, Any]) -> tuple[Data, dict[str, Any]]:
    """Return what has an order: with rows of one sample, and without buckets that are all empty."""
    small = {**settings, "global_batch_size": 1, "grid": None}
    for tried in (settings, small):
        try:
            _ = data.pipeline(tried).order
        except mm.ConfigError as error:  # too few samples or packs for a step
            trial.say("refused:", error)
        else:
            return data, tried
    assert isinstance(data.batching, mm.Buckets), "one sample makes a step"
    return replace(data, batching=None), small


def _change(trial: Trial, draw: random.Random, plan: Plan) -> Plan:
    """Draw the settings and the view of epoch 1; sometimes shards are appended, too."""
    data, settings = plan.data, plan.settings
    if draw.random() < (0.8 if data.views else 0.4) and not isinstance(data.batching, mm.Pack):
        grow(data.corpora[""], draw, trial.kinds)
        trial.say("shards appended")
        still_chosen = all(data.chosen().values())
        if not still_chosen:  # a view such as [:-6] without [-6:] has nothing of a longer corpus
            data = replace(data, views=_draw_views(trial, data.corpora))
        if trial.choose.random() < 0.3 and still_chosen:
            trial.counts["changes that only append"] += 1
            return Plan(data, settings, data.chosen(), len(data.shard_names()))
    later = {
        **settings,
        "seed": settings["seed"] + draw.randint(0, 1),
        "global_batch_size": draw.choice([settings["global_batch_size"], 1, 2, 3]),
        "grid": None,
        "drop_last": draw.random() < 0.5,
    }
    if not isinstance(data.batching, mm.Pack) and trial.choose.random() < 0.3:
        data = replace(data, views=_draw_views(trial, data.corpora))
    if isinstance(data.batching, mm.Buckets) and trial.kinds.random() < 0.6:
        data = replace(data, batching=trial.kinds.choice([None, _draw_buckets(trial)]))
    later["repeat"] = trial.kinds.randint(1, 3) if data.batching is None else 1
    data, later = _possible(trial, data, later)
    trial.say("later", later, data.views, data.batching)
    trial.counts["changes"] += 1
    return Plan(data, later, data.chosen(), len(data.shard_names()))


def _can_change(before: Plan, after: Plan) -> bool:
    """Tell whether an epoch can begin with one plan and be finished where the other one is set."""
    kept = [ref for ref in after.chosen[""] if ref[0] < before.num_shards]
    is_same = bool(after.data.views) and kept == before.chosen[""]
    return is_same or not before.data.views  # a state without a selection says all that it is


# -- reading -------------------------------------------------------------------------------------


def _read(
    trial: Trial,
    pipeline: mm.Pipeline,
    shard_of: Mapping[str, int],
    state: dict[str, Any] | None = None,
) -> Steps | None:
    """Read to the end, in this process. None: there is a step without a good sample."""
    steps: Steps = {}
    with closing(
        mm.Loader(pipeline, world=mm.World(0, 1), num_threads=1, on_change="finish_epoch")
    ) as loader:
        try:
            if state is not None:
                loader.load_state_dict(state)
            while loader.state_dict()["epoch"] < trial.num_epochs:
                for batch in loader:
                    lineage = batch["__lineage__"]
                    assert trial.removed.isdisjoint(lineage.shown), "shown, but taken down"
                    steps[lineage.epoch, lineage.step] = rows_of(batch, shard_of.__getitem__)
                    trial.set_weights(loader)
            trial.ended = json.loads(json.dumps(loader.state_dict()))
        except mm.errors.BadSampleLimitError as error:
            if "no row has a good sample" not in str(error):
                raise
            trial.counts["no good sample in a step"] += 1
            return None
    return steps


def _check_replay(
    trial: Trial,
    data: Data,
    pipeline: mm.Pipeline,
    steps: Steps,
    state: dict[str, Any] | None = None,
) -> None:
    """Compare some steps with those that `replay` plans from a state; None: from a new one."""
    draw, loader = trial.choose, mm.Loader(pipeline, world=mm.World(0, 1))
    state = (trial.ended if trial.live else state) or json.loads(json.dumps(loader.state_dict()))
    plan = getattr(pipeline.order, "plan", None)
    order, *_ = order_of_state(state, pipeline.dataset, plan)
    samples, names = data.samples(), data.shard_names()
    for epoch, step in draw.sample(sorted(steps), min(3, len(steps))):
        planned: dict[int, list[Ref]] = {}
        for row in replay(pipeline.dataset, order, epoch, [step], keys=draw.random() < 0.3):
            ref = names.index(row.shard), row.index
            planned.setdefault(row.row, []).append(ref)
            fault = samples[ref].fault
            assert row.key in (None, samples[ref].key) or fault, f"replay: key {row.key} of {ref}"
        expected = {n: list(row.planned) for n, row in steps[epoch, step].items() if row.planned}
        assert planned == expected, f"replay differs in epoch {epoch} step {step}"


def _check_views(data: Data) -> None:
    """Compare the views, here and in another process, with what they should show."""
    for name, refs in data.chosen().items():
        view = opened(data.corpora[name].open(), data.views.get(name, ()))
        for one in (view, pickle.loads(pickle.dumps(view))):
            assert len(one) == len(refs), f"a view of {len(one)} samples, not {len(refs)}"
            assert one.refs(np.arange(len(refs))) == refs, f"another view of {name!r}"


def _check_refusal(trial: Trial, before: Plan, present: Plan, state: dict[str, Any]) -> None:
    """See that a state mid-epoch is refused where one sample of one shard is another one."""
    draw, data = trial.choose, present.data
    name = draw.choice(list(before.chosen))
    has_begun = state["step"] or (data.mixture and state["epoch"])
    kept, old = set(present.chosen[name]), draw.choice(before.chosen[name])
    others = [ref for ref in data.corpora[name].planned if ref[0] == old[0] and ref not in kept]
    if not has_begun or not before.data.views.get(name) or not others:
        return
    kept = kept - {old} | {draw.choice(others)}
    data = replace(data, views={**data.views, name: (("refs", frozenset(kept)),)})
    pipeline = data.pipeline(present.settings)
    try:
        _ = pipeline.order
    except mm.ConfigError as error:  # the other sample is in no bucket
        trial.say("refused:", error)
        return
    on_change: Any = draw.choice(
        ["finish_epoch", "refuse"] if present is before else ["finish_epoch"]
    )
    answer = "taken"
    with closing(mm.Loader(pipeline, world=mm.World(0, 1), on_change=on_change)) as loader:
        try:
            loader.load_state_dict(json.loads(json.dumps(state)))
        except mm.StateError as error:
            answer = str(error)
    assert "selection" in answer or "buckets" in answer, (
        f"the state of another selection, without {old}: {answer}"
    )
    trial.counts["refused selections"] += 1


def _judged(
    trial: Trial,
    plan: Plan,
    shard_of: Mapping[str, int],
    state: dict[str, Any] | None = None,
    before: Steps | None = None,
    begun: Plan | None = None,
) -> Steps | None:
    """Read to the end and judge it. None: as of `_read`.

    `before` is as that of `judge_rest`: steps of an epoch that began with the plan `begun`.
    """
    pipeline, before = plan.data.pipeline(plan.settings), before or {}
    steps = _read(trial, pipeline, shard_of, state)
    if steps is None:
        return None
    facts = plan.data.facts(trial, pipeline)
    rest = {key: rows for key, rows in steps.items() if key in before}
    groups = trial.groups.get(min(rest, default=(0, 0))[0], ())
    of_rest = replace(facts, drop_last=True)
    if begun is not None and plan.data.mixture is None:
        of_rest = replace(of_rest, chosen=frozenset(begun.chosen[""]))
    judge_rest(of_rest, rest, before, groups)
    _check_replay(trial, plan.data, pipeline, rest, state if rest else None)
    new = {key: rows for key, rows in steps.items() if key not in before}
    num_epochs, listed = len({epoch for epoch, _ in new}), facts.listed | facts.removed
    facts = replace(facts, listed=listed, removed=frozenset(), num_epochs=num_epochs)
    judge(facts, new)
    trial.groups |= {epoch: groups_of(facts) for epoch, _ in new}
    _check_replay(trial, plan.data, pipeline, new)
    _check_views(plan.data)
    trial.counts["judged steps"] += len(steps)
    return steps


def _with_change(
    trial: Trial, present: Plan, later: Plan, steps: Steps, shard_of: Mapping[str, int]
) -> Steps | None:
    """Return the steps of epoch 0, and then those of the later plan. None: as of `_read`."""
    of_present = trial.groups.get(0, [])
    later.data.corpora[""].show(later.num_shards)
    after = _judged(trial, later, shard_of)
    trial.groups[0] = of_present
    later.data.corpora[""].show(present.num_shards)
    return after and {
        **{key: rows for key, rows in steps.items() if key[0] == 0},
        **{key: rows for key, rows in after.items() if key[0] > 0},
    }


def _take_down(
    trial: Trial, present: Plan, expected: Steps, keys: Sequence[tuple[int, int]]
) -> None:
    """Take some samples down, so that each epoch still has a step. `keys`: of steps to come."""
    draw, data = trial.choose, present.data
    ahead = [row for key in keys for row in expected[key].values()]
    refs = draw.choice(
        [
            set(data.samples()),
            {ref for row in ahead for ref in row.planned},
            {record.substitute for row in ahead for record in row.records if record.substitute},
        ]
    )
    pool = sorted(ref for ref in refs if ref[0] < present.num_shards)
    room = [
        sum(len(rows) for key, rows in expected.items() if key[0] == epoch and key[1])
        for epoch in range(trial.num_epochs)
    ]
    most = len(pool) if data.mixture else max(0, min(*room, len(pool)) - len(trial.removed))
    refs = set(draw.sample(pool, min(most, 1 + int(len(pool) * draw.choice([0, 0, 0.1, 0.25])))))
    trial.say("taken down before", keys[0], sorted(refs))
    trial.removed |= refs
    trial.counts["takedowns"] += bool(refs)
    for name, corpus in data.corpora.items():
        first = data.first_shard(name)
        own = {(s - first, i) for s, i in refs if 0 <= s - first < len(corpus.names)}
        num_taken = 0
        for part, refs_of_part in corpus.split(own):
            choices = data.views.get(name, ()) if part is corpus else ()
            num_taken += take_down(opened(part.open(), choices), sorted(refs_of_part), "a request")
            part.s3_url = ""
        assert num_taken == len(own - corpus.removed), f"{num_taken} were taken down of {own}"
        corpus.removed |= own


def _read_on(
    trial: Trial,
    plans: Sequence[Plan],
    present: Plan,
    state: dict[str, Any] | None,
    expected: Steps,
    keys: Sequence[tuple[int, int]],
    shard_of: Mapping[str, int],
) -> Steps | None:
    """Return what is to come after a takedown, judged. None: as of `_read`."""
    begun, later = plans[0] if keys[0][0] == 0 else present, plans[-1]
    kept = [k for k in keys if present.data.mixture or (keys[0][1] and k[0] == keys[0][0])]
    before = {key: expected[key] for key in kept}
    steps = _judged(trial, present, shard_of, state, before, begun)
    if steps and later is not present:
        return _with_change(trial, present, later, steps, shard_of)
    return steps


@dataclass(frozen=True)
class _Part:
    """A part of a run: who reads, for how many steps, and how it ends."""

    size: int
    rows_per_rank: Any
    num_workers: int
    num_threads: int
    storage: str
    cache: dict[str, Any]
    num_steps: int
    end: str
    is_on_device: bool
    on_change: Any
    context: Any
    """How workers start."""


def _read_in_parts(
    trial: Trial,
    folder: Path,
    draw: random.Random,
    plans: Sequence[Plan],
    expected: Steps,
    shard_of: Mapping[str, int],
    remote: float,
    workers: float,
) -> None:
    state: dict[str, Any] | None = None
    keys = sorted(expected)
    position = 0
    present, later = plans[0], plans[-1]
    while position < len(keys):
        epoch = keys[position][0]
        if (present is not later and position) and (
            epoch > 0 or (draw.random() < 0.7 and _can_change(present, later))
        ):
            present = later
            present.data.corpora[""].show(later.num_shards)
            trial.counts["changes mid-epoch"] += epoch == 0
        while trial.choose.random() < 0.4 and trial.counts["takedowns"] < 3:
            _take_down(trial, present, expected, keys[position:])
            after = _read_on(trial, plans, present, state, expected, keys[position:], shard_of)
            if after is None:
                return
            expected = {key: expected[key] for key in keys[:position]} | after
            keys = sorted(expected)
        last = len(keys) if present is later else sum(key[0] == 0 for key in keys)
        ahead = [expected[key] for key in keys[position:]]
        part = _draw_part(
            trial, folder, draw, present, (position, keys, last, ahead), remote, workers
        )
        if present is not plans[0] and keys[position][1] and epoch == 0:
            trial.counts[f"resumed mid-epoch after a change: {part.on_change}"] += 1
        if state is not None and trial.choose.random() < 0.3:
            _check_refusal(trial, plans[0] if epoch == 0 else later, present, state)
        steps, state = _read_part(trial, draw, present, part, state, shard_of)
        for key, rows in steps.items():
            assert key == keys[position], f"step {key} came, {keys[position]} is next"
            assert rows == expected[key], _difference(key, rows, expected[key])
            position += 1
        wanted = keys[position] if position < len(keys) else (trial.num_epochs, 0)
        assert (state["epoch"], state["step"]) == wanted, f"the state is not before {wanted}"
        trial.counts["parts"] += 1
        trial.counts[f"end: {part.end}"] += 1
        trial.counts[f"storage: {part.storage.partition(':')[0]}"] += 1
        trial.counts["steps"] += len(steps)


def _difference(key: tuple[int, int], rows: Mapping[int, Row], expected: Mapping[int, Row]) -> str:
    for number in sorted(rows.keys() | expected.keys()):
        if rows.get(number) != expected.get(number):
            one, other = rows.get(number), expected.get(number)
            return f"step {key} row {number} differs:\n  {one}\n  {other}"
    return "no difference"


def _draw_part(
    trial: Trial,
    folder: Path,
    draw: random.Random,
    plan: Plan,
    where: tuple[int, list[tuple[int, int]], int, list[dict[int, Row]]],
    remote: float,
    workers: float,
) -> _Part:
    position, keys, last, _ = where
    settings, rows = plan.settings, plan.settings["global_batch_size"]
    present = [key for key in keys if key[0] == keys[position][0]]
    to_end = len(present) - present.index(keys[position])
    end = draw.choice(ENDS)
    num_steps = draw.choice([1, to_end - 1, to_end, to_end + 1, draw.randint(0, len(keys))])
    most = last - position - (end == "kill")  # one step more may come after a kill
    num_steps = 0 if end == "take none" else max(0, min(num_steps, most))
    is_remote = draw.random() < remote
    num_workers = draw.randint(1, 3) if draw.random() < workers else 0
    rows_now = min(rows, *(len(expected) for expected in where[3]))
    size = draw.randint(1, min(rows_now, 2 if is_remote or num_workers else 5))
    rows_per_rank: Any = "balanced"
    if rows % size == 0 and draw.random() < 0.7:
        rows_per_rank = None
    elif draw.random() < 0.3:
        cuts = sorted(draw.sample(range(1, rows), size - 1))
        rows_per_rank = [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
        rows_per_rank = [number * settings.get("repeat", 1) for number in rows_per_rank]
    rows_of_buckets = getattr(plan.data.batching_of(rows), "rows", None) or {}
    if rows_of_buckets or len({*map(len, where[3])}) > 1:  # ranks have equal shares
        numbers = [*map(len, where[3]), *rows_of_buckets.values()]
        size = max(n for n in range(1, size + 1) if math.gcd(*numbers) % n == 0)
        rows_per_rank = trial.kinds.choice([None, "balanced"])
    cache: dict[str, Any] = {}
    if is_remote and draw.random() < 0.5:
        cache = {
            "cache_dir": str(folder / "cache"),
            "max_cache_bytes": draw.choice([1, 4096, 20_000, 1 << 30]),
        }
    storage = "shared" if is_remote else "local"
    if is_remote and trial.s3_prefix and draw.random() < 0.5:
        storage = trial.s3_prefix
    if trial.live and end == "look ahead":  # weights would begin behind what is ahead
        end = "close"
    part = _Part(
        size,
        rows_per_rank,
        num_workers,
        draw.randint(1, 3),
        storage,
        cache,
        num_steps,
        end,
        draw.random() < 0.2 and not trial.live,
        "finish_epoch" if settings.get("grid", 0) is None or draw.random() < 0.3 else "refuse",
        trial.choose.choice(["fork", "fork", "forkserver"]),
    )
    trial.say(part)
    return part


def _read_part(
    trial: Trial,
    draw: random.Random,
    plan: Plan,
    part: _Part,
    state: dict[str, Any] | None,
    shard_of: Mapping[str, int],
) -> tuple[Steps, dict[str, Any]]:
    """Read some steps on all ranks; return them, and the state behind them."""
    pipeline = plan.data.pipeline(plan.settings, part.storage, **part.cache)
    loaders = [
        mm.Loader(
            pipeline,
            world=mm.World(rank, part.size),
            rows_per_rank=part.rows_per_rank,
            num_workers=part.num_workers,
            num_threads=part.num_threads,
            multiprocessing_context=part.context,
            on_change=part.on_change,
        )
        for rank in range(part.size)
    ]
    states, steps = [], []
    try:
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            steps.append(_steps_of_rank(trial, draw, loader, part, shard_of))
            states.append(loader.state_dict())
            if not any(word in part.end for word in ("kill", "none")):
                _check_stats(loader, steps[-1])
    finally:
        for loader in loaders:
            loader.close()
    merged: Steps = {}
    shortest = min(map(len, steps))
    if part.end != "kill":
        assert all(one == states[0] for one in states), "ranks have other states"
        assert {len(one) for one in steps} == {shortest}, "ranks did other numbers of steps"
    state = min(states, key=lambda one: (one["epoch"], one["step"]))
    for key in sorted(steps[0])[:shortest]:
        merged[key] = {}
        for of_rank in steps:
            assert not merged[key].keys() & of_rank[key].keys(), f"two ranks have rows of {key}"
            merged[key] |= of_rank[key]
    return merged, json.loads(json.dumps(state))


def _steps_of_rank(
    trial: Trial,
    draw: random.Random,
    loader: mm.Loader,
    part: _Part,
    shard_of: Mapping[str, int],
) -> Steps:
    steps: Steps = {}
    stream: Iterator[Batch]
    if part.end == "take none":
        if loader.state_dict()["epoch"] < trial.num_epochs and draw.random() < 0.7:
            before = loader.state_dict()
            next(loader.iter_undelivered(), None)
            assert loader.state_dict() == before, "a batch counts that was never marked"
        return steps
    if part.end == "jump":
        here = loader.state_dict()
        next(loader.iter_undelivered(), None)
        loader.load_state_dict(state_at(here, here["epoch"] + 1, 0))
        next(loader.iter_undelivered(), None)
        loader.load_state_dict(here)
    stream = _batches(trial, loader, part)
    for batch in stream if part.num_steps else ():
        _note(trial, draw, batch, steps, shard_of, loader)
        if len(steps) == part.num_steps:
            break
    if part.end == "kill" and part.num_workers and loader._makers.workers is not None:
        for pid in loader._makers.workers.pids:
            os.kill(pid, signal.SIGKILL)
        trial.counts["killed workers"] += part.num_workers
        try:
            # Batches that were finished before may still come; they count then.
            for batch in stream:
                _note(trial, draw, batch, steps, shard_of, loader)
                break
        except mm.MMStreamError:
            pass
        steps_now = loader.state_dict()
        assert (steps_now["epoch"], steps_now["step"]) >= max(steps, default=(0, 0))
    return steps


def _batches(trial: Trial, loader: mm.Loader, part: _Part) -> Iterator[Batch]:
    """Yield batches that count as delivered when they are handed over, in one of three ways."""
    while loader.state_dict()["epoch"] < trial.num_epochs:
        if part.end == "look ahead":
            held: list[Batch] = []
            for batch in loader.iter_undelivered():
                held.append(batch)
                if len(held) > 2:
                    loader.mark_delivered(held[0])
                    yield held.pop(0)
            for batch in held:
                loader.mark_delivered(batch)
                yield batch
        elif part.is_on_device:
            yield from mm.to_device(loader, "cpu")
        else:
            yield from loader


def _note(
    trial: Trial,
    draw: random.Random,
    batch: Batch,
    steps: Steps,
    shard_of: Mapping[str, int],
    loader: mm.Loader,
) -> None:
    lineage = batch["__lineage__"]
    assert trial.removed.isdisjoint(lineage.shown), "shown, but taken down"
    rows = rows_of(batch, shard_of.__getitem__)
    steps[lineage.epoch, lineage.step] = rows
    state = loader.state_dict()
    at = (state["epoch"], state["step"])
    following = (lineage.epoch, lineage.step + 1)
    assert at == following or (at == (lineage.epoch + 1, 0)), f"state {at} after {following}"
    trial.set_weights(loader)
    if draw.random() < 0.1:
        num_parts = draw.randint(1, 4)
        joined: dict[int, Row] = {}
        for micro_batch in mm.split_rows(batch, num_parts):
            part = rows_of(micro_batch, shard_of.__getitem__)
            assert not joined.keys() & part.keys(), "a row is in two micro-batches"
            joined |= part
        assert joined == rows, f"split_rows: {joined} of {rows}"


def _check_stats(loader: mm.Loader, steps: Steps) -> None:
    """Compare a loader's counters with what it has delivered."""
    rows = [row for step in steps.values() for row in step.values()]
    kinds = Counter(record.kind for row in rows for record in row.records)
    num_skipped = kinds.pop("SkipSample", 0)
    del kinds["TakenDownError"]
    stats = loader.stats
    assert stats.num_steps == len(steps), f"num_steps {stats.num_steps}, not {len(steps)}"
    assert stats.num_bad == kinds.total(), f"num_bad {stats.num_bad}, not {kinds}"
    assert stats.num_skipped == num_skipped, f"num_skipped {stats.num_skipped}"

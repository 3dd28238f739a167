"""Samples -> lengths, by the code that training tokenizes with; and the plan of a pipeline.

Place in the flow: `measuring.plan` counts the samples of all shards. The samples go through
`RowDecoder.plan`, as those of a step do: functions before decoding, plans of media, one call of the
tokenizer. No pixel is decoded.

`Pipeline.order` calls `find_plan`, or `packs_of_mixture` for the plans of all sources. Without a
name, ``mm.Pack(8192)`` looks beside the index for the name that `mm.plan` gives: a digest of the
decoders' settings and the limits. States and replay look for the digest of a plan. Whoever opens a
plan by a name counts a few of its samples again. A plan of other lengths is refused.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import logging
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from mmstream.batching.flat import Pack
from mmstream.batching.processor import ProcessorText
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.keys import refs_at
from mmstream.dataset.mixture import Mixture
from mmstream.decoding.bad_samples import BadSamplePolicy
from mmstream.decoding.decode import Decode
from mmstream.decoding.media_shapes import MediaShapes
from mmstream.decoding.rows import RowDecoder, Transform, one_by_one
from mmstream.decoding.sample import MeasuredSample, SampleDecoding
from mmstream.decoding.sample_rng import kept_generators
from mmstream.decoding.text.decoder import DecodedText, TextDecoder, own_core
from mmstream.errors import ConfigError, ManifestError, SampleError, ShardError, SkipSample, where
from mmstream.families.registry import settings_of_families, versions_of
from mmstream.order.permute import stream_key
from mmstream.packing.order import MixturePackOrder
from mmstream.packing.plan import (
    FORMAT_VERSION,
    LEFT_OUT_REASONS,
    OVER_A_LIMIT,
    PLAN_NAME,
    PLAN_PREFIX,
    SELECTION,
    TOO_LONG,
    UNUSABLE,
    MixturePlan,
    PackLimits,
    PackPlan,
    UnitSums,
    open_plan,
    plan_folder,
    require_plan_of,
)
from mmstream.packing.planner import COLUMNS, left_out_of, settings_digest
from mmstream.progress import Progress
from mmstream.ranks import resolve_world
from mmstream.reading.fetcher import FixedDraws
from mmstream.reading.step import BatchLineage, Outcome, RawStep
from mmstream.settings import refuse_broken
from mmstream.types import IGNORED_LABEL, IntArray, SampleRef

logger = logging.getLogger(__name__)

MAX_LENGTH = 1 << 40
"""No text is cut: a plan must know how long it is."""

CHECKED_AGAIN = 16
"""Samples that are counted again where lengths are there already."""


class SampleLengths(NamedTuple):
    """The lengths of a sample."""

    values: tuple[int, ...]
    """One for each of `COLUMNS`. Of a sample that cannot be used: -1, then zeros."""
    reason: str = ""
    """Why the sample cannot be used."""


@dataclass(frozen=True, eq=False)
class LengthCounter:
    """Counts samples of a dataset as a pipeline with these decoders would make them.

    Attributes:
        dataset: Has the samples.
        decode: The decoders. Those of texts must be there.
        before: The functions before decoding.
        seed: Of the random draws.
        epochs: Whose draws are counted: a sample has the longest of its lengths. None: lengths must
            not depend on draws.
        room: Tokens that each sample gets more.
        patch_size: Side of a patch of the vision tower, in pixels.

    Raises:
        ConfigError: There is no decoder of texts.
    """

    dataset: Dataset
    decode: Decode
    before: tuple[Transform, ...] = ()
    seed: int = 0
    epochs: tuple[int, ...] | None = None
    room: int = 0
    patch_size: int = 14

    def __post_init__(self) -> None:
        text = self.decode.text
        if text is None or isinstance(text, ProcessorText):
            raise ConfigError(
                "plan: no decoder makes the tokens of texts: give decode=mm.Decode(text=...), "
                "without collate=mm.processor_collate(...)"
            )
        if text.max_length != MAX_LENGTH:
            whole = replace(text, max_length=MAX_LENGTH, padding="longest")
            object.__setattr__(self, "decode", replace(self.decode, text=whole))

    @property
    def may_draw(self) -> bool:
        """Whether lengths may depend on random draws."""
        text = self.decode.text
        return (
            bool(self.before)
            or bool(self.decode.table.media)
            or callable(text.field if text else None)
        )

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What decides the lengths, in plain JSON types.

        A function counts by its name alone: of its module there are two names where it is the main
        script.
        """
        text = self.decode.text
        assert text is not None
        tokenizer = text.tokenizer
        versions = versions_of(*settings_of_families(self.decode))
        selection = self.dataset.selection
        media = {kind: getattr(self.decode, kind) for kind in ("image", "video", "audio")}
        return {
            **({"versions of families": versions} if versions else {}),
            "tokenizer": _sha256(own_core(tokenizer).to_str()),
            "chat_template": _sha256(str(getattr(tokenizer, "chat_template", None) or "")),
            "text": _fields(text, _OTHER_FIELDS),
            **{
                kind: None if decoder is None else _fields(decoder, _NO_LENGTH)
                for kind, decoder in media.items()
            },
            "fields": sorted(self.decode.fields or {}),
            "before": [_plain(function) for function in self.before],
            "patch_size": self.patch_size,
            "seed": None if self.epochs is None else self.seed,
            "epochs": None if self.epochs is None else list(self.epochs),
            "room": self.room,
            **({} if selection is None else {SELECTION: selection.digest}),
        }

    def lengths(
        self, outcomes: Sequence[Outcome], refs: Sequence[SampleRef]
    ) -> list[SampleLengths]:
        """Return the lengths of samples: of all epochs that count, the longest of each.

        Args:
            outcomes: Raw samples, or why there are none.
            refs: (shard, index) of each.

        Raises:
            ShardError, StorageError: A file that is read by ranges cannot be read.
            ConfigError: A function of the user returned something of the wrong type.
            NameError, AttributeError, ...: A function of the user has a bug.
        """
        first, *others = self.epochs or (0,)
        lengths = self.lengths_of_draws(outcomes, refs, self.seed, first)
        for epoch in others if self.may_draw else ():
            again = self.lengths_of_draws(outcomes, refs, self.seed, epoch)
            lengths = [_longer(*pair) for pair in zip(lengths, again, strict=True)]
        return (
            [_with_room(sample_lengths, self.room) for sample_lengths in lengths]
            if self.room
            else lengths
        )

    def lengths_of_draws(
        self, outcomes: Sequence[Outcome], refs: Sequence[SampleRef], seed: int, epoch: int
    ) -> list[SampleLengths]:
        """Return the lengths of samples with the draws of one epoch; as `lengths`."""
        rows = RowDecoder(
            FixedDraws(seed, epoch, self.dataset.name_of),  # type: ignore[arg-type]  # reads nothing
            self.decode,
            self.before,
            (),
            BadSamplePolicy(),
            Progress(),
        )
        planned = list(refs)
        lineage = BatchLineage(epoch, 0, 0, planned, [True] * len(planned), planned)
        results = []
        with kept_generators():
            step = RawStep(lineage, list(outcomes))
            prepared = rows.plan(step, one_by_one, all_shapes=True)
            for outcome, entry in zip(outcomes, prepared, strict=True):
                try:
                    results.append(self._lengths(outcome if entry is None else entry))
                except SkipSample as error:
                    results.append(_unusable(f"left out: {error}"))
                except SampleError as error:
                    results.append(_unusable(str(error)))
        return results

    def _lengths(self, entry: Any) -> SampleLengths:
        """Return the lengths of a sample that pass 1 has planned, or raise why there are none."""
        if isinstance(entry, SampleError | ShardError):
            raise entry
        assert isinstance(entry, SampleDecoding)
        measured: MeasuredSample = entry.measured()
        assert measured.text is not None
        ids = _documents(measured.text, "input_ids")
        # The first token of a document has no token before it that could predict it.
        learned = [labels[1:] != IGNORED_LABEL for labels in _documents(measured.text, "labels")]
        patches = np.array(list(num_patches(measured.shapes, self.patch_size)), dtype=np.int64)
        seconds = sum(audio.num_samples / audio.sample_rate for audio in measured.shapes.audios)
        media = (len(measured.shapes.images), int(patches.sum()), int(patches @ patches), seconds)
        # Media that have tokens in the text come again for each document.
        is_repeated = self.decode.text is not None and bool(self.decode.text.counted_media)
        num_times = len(ids) if is_repeated else 1
        return SampleLengths(
            (
                sum(map(len, ids)),
                sum(map(np.count_nonzero, learned)),
                len(ids),
                *(math.ceil(amount * num_times) for amount in media),
            )
        )

    def difference(
        self,
        shard_ends: IntArray,
        positions: IntArray,
        tokens: npt.NDArray[np.signedinteger[Any]],
        source: str,
        chosen: Sequence[int] = (),
        max_tokens: int | None = None,
    ) -> str | None:
        """Count a few samples again: the longest, the shortest, and others spread over all.

        Args:
            shard_ends: int64 [num_shards], samples up to the end of each shard.
            positions: int64 [n], of samples whose lengths were counted before.
            tokens: int [n], their lengths.
            source: Where these lengths come from, in words.
            chosen: Rows of `positions` that are counted too.
            max_tokens: To how many tokens samples are cut. None: none is cut.

        Returns:
            How a sample has another length now, in words. None: none has.
        """
        if not tokens.size:
            return None
        extreme = {int(tokens.argmax()), int(tokens.argmin()), *chosen}
        spread = np.linspace(0, tokens.size - 1, CHECKED_AGAIN - len(extreme)).astype(np.int64)
        rows = sorted({*extreme, *spread.tolist()})
        refs = refs_at(shard_ends, positions[rows])
        with ThreadPoolExecutor(CHECKED_AGAIN) as pool:
            outcomes = list(pool.map(self.read, refs))
        lengths = self.lengths(outcomes, refs)
        for ref, outcome, now, before in zip(
            refs, outcomes, lengths, tokens[rows].tolist(), strict=True
        ):
            count = now.values[0] if max_tokens is None else min(now.values[0], max_tokens)
            if isinstance(outcome, dict) and count != before:  # else it is damaged
                address = where(self.dataset.name_of(ref[0]), ref[1], outcome["__key__"])
                return f"{address} {count_text(now)}, and {before:,} {source}"
        return None

    def read(self, ref: SampleRef) -> Outcome:
        """Return a raw sample, or why it cannot be used."""
        try:
            return self.dataset.read(*ref)
        except SampleError as error:
            return error


def count_text(lengths: SampleLengths) -> str:
    """Return the tokens of a sample in words."""
    if lengths.reason:
        return f"cannot be used ({lengths.reason})"
    return f"has {lengths.values[0]:,} tokens"


def _longer(first: SampleLengths, second: SampleLengths) -> SampleLengths:
    """Return the larger of each length of a sample in two epochs. One that fails is left out."""
    if first.reason or second.reason:
        return first if second.reason and not first.reason else second
    values = tuple(max(pair) for pair in zip(first.values, second.values, strict=True))
    return SampleLengths(values)


def _with_room(lengths: SampleLengths, room: int) -> SampleLengths:
    if lengths.reason:
        return lengths
    return lengths._replace(values=(lengths.values[0] + room, *lengths.values[1:]))


def _documents(text: DecodedText, name: str) -> list[IntArray]:
    """Return a field of tokens of each text of a sample."""
    values = text.tokens[name]
    return values if isinstance(values, list) else [values]


def num_patches(shapes: MediaShapes, patch_size: int) -> Iterator[int]:
    """Yield the patches of each picture, tile and pair of frames that a vision tower takes.

    Examples:
        >>> from mmstream.decoding.image.geometry import ImageShape
        >>> shapes = MediaShapes([ImageShape(336, 336, (600, 800), num_tiles=2)])
        >>> list(num_patches(shapes, 14))
        [576, 576]
    """
    for image in shapes.images:
        num_of_tile = -(-image.height // patch_size) * -(-image.width // patch_size)
        yield from [num_of_tile] * image.num_tiles
    for video in shapes.videos:
        num_of_frame = -(-video.height // patch_size) * -(-video.width // patch_size)
        yield from [num_of_frame] * -(-video.num_frames // 2)


def _unusable(reason: str) -> SampleLengths:
    return SampleLengths((-1, *[0] * (len(COLUMNS) - 1)), reason)


# -- what decides the lengths, in words ------------------------------------------------------------

_OTHER_FIELDS = ("tokenizer", "max_length", "padding")
"""Settings of a text decoder that have a line of their own, or decide no length."""


_NO_LENGTH = (
    "scaled_decoding",
    "interpolation",
    "fill",
    "flip",
    "mask",
    "max_memory",
    "timeout_s",
)
"""Settings of decoders of media that decide no length."""


def differing_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that differ, such as "tokenizer" or "image.size"."""
    names = []
    for name in dict.fromkeys([*old, *new]):
        before, now = old.get(name), new.get(name)
        if before == now:
            continue
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            names += [f"{name}.{inner}" for inner in differing_settings(before, now)]
        else:
            names.append(name)
    return names


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _fields(decoder: Any, without: Sequence[str] = ()) -> dict[str, Any]:
    return {
        field.name: _plain(getattr(decoder, field.name))
        for field in dataclasses.fields(decoder)
        if field.init and field.name not in without
    }


def _plain(value: Any) -> Any:
    """Return a value in plain JSON types. Equal settings give equal values in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [_plain(item) for item in items]
    if isinstance(value, partial):
        call = [
            _plain(value.func),
            [_plain(argument) for argument in value.args],
            _plain(value.keywords),
        ]
        return call if value.args or value.keywords else call[0]
    if isinstance(value, TextDecoder | Decode):
        return type(value).__name__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__, **_fields(value)}
    return getattr(value, "__qualname__", type(value).__qualname__)


# -- the plan that was made of them ----------------------------------------------------------------


NOT_ON_PURPOSE = tuple(LEFT_OUT_REASONS[i] for i in (UNUSABLE, TOO_LONG, OVER_A_LIMIT))
"""Why samples are in no pack, where nobody has asked for it by a condition or a bad list."""


class _Draws(msgspec.Struct):
    """How the samples of a plan were counted, beside the decoders."""

    seed: int | None = None
    epochs: tuple[int, ...] | None = None
    room: int = 0
    patch_size: int = 14


def plan_name(limits: PackLimits, settings: Mapping[str, Any]) -> str:
    """Return the name of a plan: T, and a digest of the limits and the decoders.

    Args:
        limits: What a pack may hold.
        settings: `LengthCounter.settings`. Random draws do not count.
    """
    decoders = {name: settings[name] for name in settings.keys() - {*_Draws.__struct_fields__}}
    digest = settings_digest({"limits": limits.as_json(), "decoders": decoders})
    return f"{limits.max_tokens}-{digest[:12]}"


def find_plan(
    dataset: Dataset,
    pack: Pack,
    decode: Decode | None,
    before: Sequence[Transform] = (),
    seed: int = 0,
) -> PackPlan:
    """Return the plan of a pipeline.

    Args:
        dataset: What is packed.
        pack: The length of rows, their limits, and the plan if one is named.
        decode: The decoders of the pipeline. Without one of texts, lengths cannot be counted, and a
            plan must be named.
        before: Its functions before decoding.
        seed: Of its random draws.

    Raises:
        ConfigError: There is no plan of these decoders and limits, or it does not fit: it is of
            other shards or lengths. The message has the command.
        FileNotFoundError: There is no plan of this name.
        ManifestError: It is damaged.
        ShardError, StorageError: The dataset cannot be read.
    """
    counter = None
    if decode is not None and decode.text is not None:
        counter = LengthCounter(dataset, decode, tuple(before), seed)
    if pack.plan is None:
        plan = _plan_of_decoders(dataset, pack, counter)
    elif isinstance(pack.plan, PackPlan):
        plan = pack.plan
    else:
        address = str(pack.plan)
        plan = open_plan(
            address if "/" in address else plan_folder(dataset.index_store.url, address)
        )
    name = plan.url or "the plan"
    refuse_broken(
        (
            plan.settings.max_tokens != pack.max_tokens,
            f"mm.Pack({pack.max_tokens}): {name} has packs of {plan.settings.max_tokens} tokens: "
            "give another plan, or its max_tokens",
        ),
        (
            pack.limits not in (None, plan.settings),
            f"mm.Pack(limits=): {name} has other limits: give another plan, or leave out one of "
            "the two",
        ),
    )
    require_plan_of(dataset, plan)
    if counter is not None and not isinstance(pack.plan, PackPlan):
        _require_lengths(counter, plan)
    if resolve_world(None).rank == 0:
        _tell_what_is_left_out(dataset, plan)
    return plan


def _plan_of_decoders(dataset: Dataset, pack: Pack, counter: LengthCounter | None) -> PackPlan:
    """Return the plan that has the digest of these decoders and limits for its name."""
    if counter is None:
        raise ConfigError(
            "mm.Pack: no decoder makes the tokens of texts, so nobody can count them: give it a "
            "plan, mm.Pack(..., plan=folder)"
        )
    url, limits = dataset.index_store.url, pack.limits or PackLimits(pack.max_tokens)
    try:
        plan = open_plan(plan_folder(url, plan_name(limits, counter.settings)))
    except FileNotFoundError:
        raise ConfigError(
            f"mm.Pack({pack.max_tokens}): no plan of these decoders and limits is beside {url}: "
            f"{_cure(dataset, limits)}"
        ) from None
    if len(plan.shards) < dataset.num_shards:
        raise ConfigError(
            f"{plan.url}: is of the first {len(plan.shards)} of {dataset.num_shards} shards: "
            f"{_cure(dataset, limits)}"
        )
    return plan


def _cure(dataset: Dataset, limits: PackLimits, *more: str) -> str:
    """Return the command that makes a plan, and the call."""
    if dataset.selection is not None:
        return "run mm.plan(pipeline) once, with this view" + ", overwrite=True" * bool(more)
    arguments = ["mmstream", "plan", dataset.index_store.url]
    defaults = PackLimits(limits.max_tokens).as_json() | {"max_tokens": None}
    for name, value in limits.as_json().items():
        if value != defaults[name]:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    command = shlex.join([*arguments, *more, "--pipeline", "MODULE:OBJECT"])
    return f"run `{command}` once, or mm.plan(pipeline)"


def _require_lengths(counter: LengthCounter, plan: PackPlan) -> None:
    """Raise a ConfigError where a few samples have other lengths than in a plan; see `misfit`."""
    difference = misfit(counter, plan)
    if difference is None:
        return
    cure = _cure(counter.dataset, plan.settings, "--overwrite")
    raise ConfigError(
        f"{plan.url}: its lengths are not those of this pipeline: {difference}: {cure}"
    )


def misfit(counter: LengthCounter, plan: PackPlan) -> str | None:
    """Count a few samples of a plan. Return how its lengths are others than those of a pipeline.

    Raises:
        ManifestError: The plan is damaged.
        ShardError, StorageError: The dataset cannot be read.
    """
    try:
        draws = msgspec.convert(plan.lengths, _Draws)
    except msgspec.ValidationError:
        raise ManifestError(
            f"{plan.url}: is damaged; run `mmstream plan` with --overwrite"
        ) from None
    if draws.epochs and draws.seed != counter.seed:
        return f"it has those of the random draws of seed {draws.seed}, not of {counter.seed}"
    counter = replace(counter, epochs=draws.epochs, room=draws.room, patch_size=draws.patch_size)
    patches = plan.unit_rows[:, 1 + UnitSums._fields.index("patches")]
    largest = [int(plan.unit_rows[patches.argmax(), 0])] if plan.num_units else []
    max_tokens = plan.settings.max_tokens if plan.settings.overlong == "truncate" else None
    of_sample = counter.difference(
        plan.shard_ends, plan.members, plan.member_tokens, "in the plan", largest, max_tokens
    )
    if of_sample is None:
        return None
    names = differing_settings(plan.lengths, counter.settings)
    settings = ", ".join(names[:4]) or "no setting, so a function or a library"
    return f"{of_sample}; what differs: {settings}"


def _tell_what_is_left_out(dataset: Dataset, plan: PackPlan) -> None:
    """Warn of samples that no epoch will show, but for those that were left out on purpose."""
    left_out = [entry for entry in left_out_of(plan) if entry.reason in NOT_ON_PURPOSE]
    if left_out:
        logger.warning(
            "%r: no epoch shows the samples that are in no pack: %s",
            plan,
            ", ".join(f"{entry.num_samples:,} {entry.reason}" for entry in left_out),
        )
    if len(plan.shards) < dataset.num_shards:
        logger.warning(
            "%r: is of the first %d of %d shards, and the others are not read; run `mmstream plan` "
            "again",
            plan,
            len(plan.shards),
            dataset.num_shards,
        )


class _PlanHead(msgspec.Struct):
    """What of a plan says whether it is the one of a state."""

    digest: str
    shards: list[object]
    version: int = 1


def plan_of_digest(dataset: Dataset, digest: str) -> PackPlan | None:
    """Return the plan of a digest with the most shards, from beside the index.

    One that this version cannot open is taken only where there is no other, for its message.
    """
    root = dataset.index_store
    urls = {}
    for folder in root.folders():
        if not folder.startswith(PLAN_PREFIX):
            continue
        with suppress(FileNotFoundError, msgspec.MsgspecError):
            head = msgspec.json.decode(root.read(f"{folder}/{PLAN_NAME}"), type=_PlanHead)
            if head.digest == digest:
                is_current = head.version == FORMAT_VERSION
                urls[is_current, len(head.shards)] = root.url_of(folder)
    return open_plan(urls[max(urls)]) if urls else None


def plan_or_plans_of_state(
    data: Dataset | Mixture, state: Mapping[str, Any]
) -> PackPlan | MixturePlan | None:
    """Return the plan, or the plans of a mixture, that a saved state is of.

    Args:
        data: What is packed.
        state: ``loader.state_dict()``.

    Returns:
        None: a plan is not beside its index, or the state is not of packs.
    """
    identity = state.get("order")
    if not isinstance(identity, Mapping):
        return None
    if isinstance(data, Dataset):
        return plan_of_digest(data, identity["plan"]) if "plan" in identity else None
    plans = {}
    for source in identity.get("sources", ()):
        dataset = data.datasets.get(source.get("name"))
        plan = None if dataset is None else plan_of_digest(dataset, source.get("plan"))
        if plan is None:
            return None
        plans[source["name"]] = plan
    return _joined(data, plans) if plans else None


# -- mixtures -------------------------------------------------------------------------------------


def seed_of_source(seed: int, name: str) -> int:
    """Return the seed of the random draws of a source of a mixture."""
    return stream_key(seed, "source", name)


def packs_of_mixture(
    mixture: Mixture,
    pack: Pack,
    decode: Decode | None,
    before: Sequence[Transform] = (),
    seed: int = 0,
    **settings: Any,
) -> MixturePackOrder:
    """Return the order over the packs of a mixture.

    The weights become shares of packs: those weights over what a pack of the source holds in the
    mean. The log says them.

    Args:
        mixture: What is packed. Each of its sources needs a plan with the same limits.
        pack: The settings of packs. Its `plan` is None, a name that the plans of all sources have,
            or a dict of plans by source.
        decode: The decoders of the pipeline.
        before: Its functions before decoding.
        seed: Of the mixture.
        settings: Of the order.

    Raises:
        ConfigError: As `find_plan`, or the plans do not go together.
    """
    plans = {
        name: find_plan(
            dataset,
            replace(pack, plan=_plan_of_source(pack.plan, name, mixture)),
            decode,
            before,
            seed_of_source(seed, name),
        )
        for name, dataset in mixture.datasets.items()
    }
    plan = _joined(mixture, plans)
    shares = plan.shares_by_step(mixture.weights, pack.weights_of or "samples")
    order = MixturePackOrder.from_plans(
        plan, mixture.corpora, shares, epoch_steps=mixture.epoch_steps, seed=seed, **settings
    )
    if resolve_world(None).rank == 0:
        for step, of_step in shares.items():
            summary = ", ".join(f"{share:,} of {name}" for name, share in of_step.items())
            total = sum(of_step.values())
            logger.info("from step %s: of %d packs, on average: %s", f"{step:,}", total, summary)
    return order


def _joined(mixture: Mixture, plans: Mapping[str, PackPlan]) -> MixturePlan:
    return MixturePlan(plans, [mixture.datasets[name].num_shards for name in plans])


def _plan_of_source(plan: Any, name: str, mixture: Mixture) -> Any:
    """Return the plan that a source is given, or None."""
    if plan is None:
        return None
    if isinstance(plan, Mapping):
        if plan.keys() != mixture.datasets.keys():
            raise ConfigError(
                f"mm.Pack(plan=): names {sorted(plan)}, the sources are {sorted(mixture.datasets)}"
            )
        return plan[name]
    if isinstance(plan, str | os.PathLike) and "/" not in os.fspath(plan):
        return plan
    raise ConfigError(
        "mm.Pack(plan=...): each source of a mixture has a plan of its own: give the name that all "
        "of them have, or {source: plan}"
    )

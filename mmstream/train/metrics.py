"""Measures the steps, and tells of them: JSON lines per rank, the log, and hooks.

    loop.fit -> `Meter.read` -> `StepLog.write` -> the user's hooks, such as `TensorBoard`

The JSON lines are the history of the weights. Each line is handed to the system before the next
step begins, so it survives a ``kill -9``. When a run resumes, the lines of undone steps are
removed: those after the checkpoint from which it resumes.

Every rank calls its hooks. One that raises is not called again. The ranks learn of it with the sums
of the next step, so that all of them save the same step and end.

`TensorBoard`, `WandB` and `Prometheus` also go into a loop of one's own. For the first two rank 0
writes: what the ranks have in common is the same in the metrics of each. Only the hook that is used
imports its package.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmstream.batching.valid import is_flat
from mmstream.decoding.bad_samples import Stats
from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.storage.local import create_file
from mmstream.train.config import Logger
from mmstream.train.distributed import TrainProcess, float64_scalar
from mmstream.types import FILTERED, KINDS, Batch

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(?:metrics|validation)-rank(\d+)\.jsonl")

_BATCH_COUNTS = ("tokens", "positions", "samples", "rows")
"""What `_count` returns of a batch."""

_LOADER_COUNTS = (
    "num_samples",
    "num_cut_texts",
    "num_dropped_parts",
    "num_wrong_reads",
    "num_bytes",
    "num_requests",
    "num_cached_bytes",
    "num_cache_hit_bytes",
)
"""Counts of the loader since the run started, summed over the ranks."""


_STAGES = ("read_s", "decode_s", "collate_s")
"""Seconds of the loader since the run started, of this rank."""


class Meter:
    """Clock and counters of one rank.

    Each step calls `arrived`, then `stepped`, perhaps `read`, and then `start`.

    Args:
        batches: a `DeviceLoader`. Its counts tell its waiting time and its bad samples.
        process: this rank.
    """

    def __init__(self, batches: Any, process: TrainProcess) -> None:
        self._stats: Stats = batches.stats
        pipeline = getattr(batches.loader, "pipeline", None)
        batching = getattr(pipeline, "batching", None)
        self._max_tokens: int | None = getattr(batching, "max_tokens", None)  # of a row of packs
        sources = batches.state_dict().get("order", {}).get("sources", ())
        self._process = process
        self._is_cuda = process.device.type == "cuda"
        self._rows_of_source = dict.fromkeys((source["name"] for source in sources), 0)
        self._position: dict[str, Any] = {}
        self._reset()
        self.start()

    def _reset(self) -> None:
        """Count from 0 what a line counts since the line before."""
        self._batch_counts: Tensor = torch.zeros(
            4, dtype=torch.float64, device=self._process.device
        )
        self._rows_of_source = dict.fromkeys(self._rows_of_source, 0)
        self._stages_before = {name: getattr(self._stats, name) for name in _STAGES}
        self._wait_s: float = 0.0
        self._total_s: float = 0.0

    def start(self) -> None:
        """Start to wait for the data of a step."""
        self._mark = time.perf_counter()
        self._loader_wait_s = self._stats.wait_s

    def arrived(self, group: list[Batch]) -> None:
        """Stop waiting: the batches of a step are here. Count their rows and tokens."""
        elapsed = time.perf_counter() - self._mark
        # The rest of that time moved the batch to the device.
        waited = self._stats.wait_s - self._loader_wait_s
        self._wait_s += min(elapsed, waited)
        for batch in group:
            self._batch_counts = self._batch_counts + _count(batch)
            for source in _sources_of(batch) if self._rows_of_source else ():
                self._rows_of_source[source] += 1
        lineage = group[-1]["__lineage__"]
        self._position = {"epoch": lineage.epoch, "step": lineage.step}

    def stepped(self) -> None:
        """End a step. On CUDA its kernels are launched, but may still run."""
        self._total_s += time.perf_counter() - self._mark

    def read(
        self, rank_loss: Tensor, grad_norm: Tensor, *, num_steps: int, lr: float
    ) -> dict[str, Any]:
        """Return the line of metrics of a step that has ended, which `StepLog.write` describes.

        Rates are over the time since the line before. All ranks must call it together. The host
        waits for the device.

        Args:
            rank_loss: this rank's share of the loss, whose sum over the ranks is the loss.
            grad_norm: norm of the gradient, the same on every rank.
            num_steps: optimizer steps since the first start, this one included.
            lr: learning rate of the step.
        """
        started = time.perf_counter()
        counts = {
            "loss": rank_loss,
            **dict(zip(_BATCH_COUNTS, self._batch_counts, strict=True)),
            **{name: getattr(self._stats, name) for name in _LOADER_COUNTS},
            **{f"bad {kind}": self._stats.bad[kind] for kind in KINDS},
            **{f"source {name}": count for name, count in self._rows_of_source.items()},
        }
        sums = self._process.sum_over_ranks(*counts.values()).tolist()
        total = dict(zip(counts, sums, strict=True))
        seconds = max(self._total_s + time.perf_counter() - started, 1e-9)
        bad = {kind: int(total[f"bad {kind}"]) for kind in KINDS if total[f"bad {kind}"]}
        has_tokens, num_skipped = total["positions"] > 0, bad.get(FILTERED, 0)
        line = {
            **self._position,
            "num_steps": num_steps,
            "loss": total["loss"],
            "lr": lr,
            "grad_norm": grad_norm.item(),
            "samples_per_s": round(total["samples"] / seconds, 1),
            "tokens_per_s": round(total["tokens"] / seconds, 1) if has_tokens else None,
            "padding_fraction": (
                round(1 - total["tokens"] / total["positions"], 4) if has_tokens else None
            ),
            "wait_fraction": round(self._wait_s / seconds, 3),
            **{
                f"wait_p{percent}_s": round(self._stats.wait_quantile_s(percent), 4)
                for percent in (50, 95, 99)
            },
            **{
                name: round(getattr(self._stats, name) - before, 4)
                for name, before in self._stages_before.items()
            },
            "num_bad": sum(bad.values()) - num_skipped,
            "num_skipped": num_skipped,
            "bad": bad,
            "num_bytes": int(total["num_bytes"]),
            "num_requests": int(total["num_requests"]),
            "num_wrong_reads": int(total["num_wrong_reads"]),
            "num_cut_texts": int(total["num_cut_texts"]),
            "num_dropped_parts": int(total["num_dropped_parts"]),
            "cut_text_fraction": round(total["num_cut_texts"] / max(total["num_samples"], 1), 4),
        }
        if self._max_tokens is not None:
            line["fill"] = round(total["tokens"] / (total["rows"] * self._max_tokens), 4)
        hits = total["num_cache_hit_bytes"]
        if hits or total["num_cached_bytes"]:
            line["cache_hit_fraction"] = round(hits / (total["num_bytes"] + hits), 4)
        if self._rows_of_source:
            of_sources = {name: int(total[f"source {name}"]) for name in self._rows_of_source}
            line["sources"] = {name: count for name, count in of_sources.items() if count}
        if self._is_cuda:
            line["memory_bytes"] = torch.cuda.max_memory_allocated(self._process.device)
        self._reset()
        return line


def _sources_of(batch: Batch) -> Iterable[str]:
    """Return the source of each valid row, or of each sample in a valid row without padding.

    A sample may be several documents, which have the same source.
    """
    if not is_flat(batch):
        lineage = batch["__lineage__"]
        empty = {bad.row for bad in lineage.bad if bad.substitute is None}
        rows = enumerate(batch["__source__"], start=lineage.start * lineage.repeat)
        return [source for row, source in rows if row // lineage.repeat not in empty]
    samples = batch["document_sample"].tolist()
    valid = batch["__valid__"][batch["document_row"]].tolist()
    documents = [pair for pair in zip(samples, valid, strict=True) if pair[0] >= 0]
    return {
        sample: source
        for (sample, is_valid), source in zip(documents, batch["__source__"], strict=True)
        if is_valid
    }.values()


def _count(batch: Batch) -> Tensor:
    """Return float64 [4]: tokens of valid rows, positions for tokens, valid samples, and rows.

    Without text the first two are 0. For example, valid rows of 5 and 3 tokens and one invalid row,
    padded to length 5, give 8, 15, 2 and 3. A row of a pack has several samples.
    """
    valid = batch["__valid__"]
    mask = batch.get("attention_mask")
    if is_flat(batch):
        lineage = batch["__lineage__"]
        num_samples = sum(lineage.valid) if lineage.rows is None else len(lineage.rows)
        counts = [batch["num_tokens"], batch["input_ids"].numel(), num_samples]
    elif not isinstance(mask, Tensor):
        counts = [0, 0, valid.sum()]
    else:
        counts = [(mask * valid.unsqueeze(1)).sum(), mask.numel(), valid.sum()]
    counts.append(len(valid))
    return torch.stack([float64_scalar(count, valid.device) for count in counts])


class StepLog:
    """Writes the metrics of one rank, and calls its hooks.

    What hooks raise is held back until the run is saved.

    Args:
        folder: local folder of ``metrics-rank{r}.jsonl`` and ``validation-rank0.jsonl``. None: the
            metrics go only to the log.
        process: this rank. Only rank 0 writes to the log.
        num_steps: optimizer steps of the checkpoint from which the run resumes. Later lines are
            removed.
        hooks: as `mmstream.train.train` takes them.

    Raises:
        ConfigError: as of `check_hooks`.
    """

    def __init__(
        self,
        folder: str | None,
        process: TrainProcess,
        num_steps: int,
        hooks: Sequence[Any] = (),
    ) -> None:
        self._hooks = check_hooks(hooks)
        self._has_any = bool(self._hooks)  # also when all of them have failed
        self._error: MMStreamError | None = None
        self._process = process
        self._ranks = {"rank": process.rank, "world_size": process.world_size}
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            _cut_history(self._folder, process, num_steps)

    @property
    def has_failed(self) -> bool:
        """Whether a hook of this rank has raised."""
        return self._error is not None

    def write(self, line: dict[str, Any]) -> None:
        """Write the metrics of one step.

        Args:
            line: a dict with these fields:

                - epoch, step: position of the last loader step; `step` counts from 0 per epoch
                - num_steps: optimizer steps since the first start, this one included
                - loss, lr, grad_norm: of this step; the norm is before clipping
                - samples_per_s, tokens_per_s: over all ranks, since the line before
                - padding_fraction: share of padding among token positions; None without text
                - fill: with packs, share of the room of rows that has tokens, since the line before
                - wait_fraction: share of the time spent waiting for data
                - wait_p50_s, wait_p95_s, wait_p99_s: seconds that so many percent of this rank's
                  last 1,000 batches were waited for at most
                - read_s, decode_s, collate_s: seconds that the workers of this rank took to make
                  the batches since the line before, by stage
                - memory_bytes: on CUDA, peak of the allocated memory
                - num_bad, num_skipped: bad samples, and samples that a filter left out, of all
                  ranks since the run started; bad has both by kind
                - num_bytes, num_requests: read from storage, by all ranks since the run started
                - num_wrong_reads: reads that came with bytes unlike their checksums, of all ranks
                  since the run started
                - cache_hit_fraction: with a node cache, share of the bytes that came from it, over
                  all ranks since the run started
                - num_cut_texts, cut_text_fraction: samples whose text `max_length` cut, of all
                  ranks since the run started, and their share
                - num_dropped_parts: parts of conversations that nothing decodes, with
                  ``undecoded_parts="drop"``
                - sources: in a mixture, valid rows per source, over all ranks, since the line
                  before
                - keys, lineage: with `log_keys`, this rank's samples since the line before (see
                  `mmstream.audit`)
        """
        if self._process.rank == 0:
            logger.info(
                "epoch %d step %d loss %.4f, %.0f samples/s, %.0f %% waiting for data",
                line["epoch"],
                line["step"],
                line["loss"],
                line["samples_per_s"],
                100 * line["wait_fraction"],
            )
        line = {**line, **self._ranks}
        self._append(f"metrics-rank{self._process.rank}.jsonl", line)
        self._call("on_step", line["num_steps"], line)

    def write_validation(self, line: dict[str, Any]) -> None:
        """Write a validation pass, on rank 0: num_steps, loss, weight (rows or tokens), seconds."""
        if self._process.rank == 0:
            logger.info("validation after %d steps: loss %.4f", line["num_steps"], line["loss"])
            self._append("validation-rank0.jsonl", line)
        self._call("on_validation", line["num_steps"], {**line, **self._ranks})

    def saved(self, path: str) -> None:
        """Call ``on_checkpoint`` when rank 0 has written the checkpoint."""
        if self._has_any:
            self._process.wait_for_all()
        self._call("on_checkpoint", path)

    def end(self) -> None:
        """Call ``on_end``, then raise what a hook of any rank has raised. All call it together.

        Raises:
            MMStreamError: names the hook, and has its error as the cause.
        """
        self._call("on_end")
        if self._has_any and self._process.sum_over_ranks(self.has_failed).item():
            raise self._error or MMStreamError("a hook of another rank has failed; see its log")

    def _call(self, method: str, *arguments: Any) -> None:
        """Call this method of all hooks that have it."""
        for hook in self._hooks:
            try:
                getattr(hook, method, _nothing)(*map(copy, arguments))  # it may change a line
            except Exception as error:
                text = f"the hook {_name(hook)}.{method} raised {type(error).__name__}"
                logger.exception("%s; the run saves a checkpoint and ends", text)
                self._hooks = [other for other in self._hooks if other is not hook]
                if self._error is None:
                    self._error = MMStreamError(
                        f"train: {text}: {escaped(error)}; its steps are saved"
                    )
                    self._error.__cause__ = error

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append a line of JSON. Infinity and NaN, which JSON lacks, become null.

        It is ASCII: keys of foreign tars may hold bytes that are not text and have no UTF-8 form.
        """
        if self._folder is None:
            return
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in line.items()
        }
        with Path(self._folder, name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")


def _cut_history(folder: Path, process: TrainProcess, num_steps: int) -> None:
    """Remove the lines of steps after `num_steps`, and an incomplete last line.

    Each rank cuts its own files. Rank 0 also cuts the files of ranks that this run does not have,
    which an earlier run on more ranks wrote.
    """
    for path in sorted(folder.glob("*-rank*.jsonl")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        writer = int(match[1])
        if process.rank != (writer if writer < process.world_size else 0):
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if _steps_of(line) <= num_steps]
        if len(kept) < len(lines):
            with create_file(path) as file:
                file.write("".join(kept).encode())
            num_cut = len(lines) - len(kept)
            logger.info("%s: removed %d lines of undone steps", path.name, num_cut)


def _steps_of(line: str) -> float:
    """Return num_steps of a line; infinity for a line that a crash left incomplete."""
    try:
        return int(json.loads(line)["num_steps"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


# -- hooks: objects that get the metrics -----------------------------------------------------------

METHODS = ("on_step", "on_validation", "on_checkpoint", "on_end")
"""What a hook may have; one is enough."""


def check_hooks(hooks: Any) -> list[Any]:
    """Return the hooks as a list.

    Raises:
        ConfigError: one has none of `METHODS`, or a misspelt one.
    """
    if not isinstance(hooks, Sequence):
        raise ConfigError(f"train: hooks={escaped(hooks)}: give a list of hooks")
    known = ", ".join(METHODS)
    for hook in hooks:
        if isinstance(hook, type):
            raise ConfigError(f"train: the hook {hook.__name__} is a class: give an object of it")
        named = [
            name
            for name in dir(hook)
            if name.startswith("on_") and callable(getattr(hook, name, None))
        ]
        unknown = [name for name in named if name not in METHODS]
        if unknown or not named:
            has = f"has {', '.join(unknown)}" if unknown else "has no method of a hook"
            raise ConfigError(f"train: the hook {_name(hook)} {has}; the loop calls {known}")
    return list(hooks)


def _name(hook: Any) -> str:
    return escaped(getattr(hook, "__name__", type(hook).__name__))  # a module has a name


def _nothing(*_arguments: object) -> None:
    """Stand in for a method that a hook does not have."""


# -- TensorBoard, Weights & Biases, Prometheus -----------------------------------------------------


def logger_hook(name: Logger, folder: str) -> Any:
    """Return the hook of a logger of ``TrainConfig(log=...)``.

    Raises:
        ConfigError: its package is missing.
    """
    if name == "prometheus":
        return Prometheus(folder)
    return TensorBoard(Path(folder, name)) if name == "tensorboard" else WandB(dir=folder)


class _ForLines:
    """A hook that takes the line of a validation pass as it takes those of steps."""

    on_step: Callable[[int, Mapping[str, Any]], None]

    def on_validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the numbers of a validation pass, which get names such as ``validation/loss``."""
        self.on_step(step, {"rank": metrics.get("rank", 0), "validation": metrics})


class TensorBoard(_ForLines):
    """A hook that writes the numbers of each line of metrics for TensorBoard.

    Each call is in the file when it returns. After a resume, TensorBoard hides the steps that are
    done again.

    Args:
        folder: local folder of the event files, for ``tensorboard --logdir``. Nothing is written
            before the first call.

    Raises:
        ConfigError: the package tensorboard is missing.

    Examples:
        >>> from mmstream.train import TensorBoard, TrainConfig, train  # doctest: +SKIP
        >>> train(TrainConfig("shards/", "run/"), hooks=[TensorBoard("run/")])  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path) -> None:
        self._package = _imported("torch.utils.tensorboard", "tensorboard")
        self._folder = str(folder)
        self._writer: Any = None

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of a line of metrics.

        Args:
            step: optimizer steps since the first start.
            metrics: numbers by name; those of a dict, such as ``sources``, get both names. With a
                ``rank`` above 0, nothing is written.
        """
        if metrics.get("rank"):
            return
        if self._writer is None:
            self._writer = self._package.SummaryWriter(self._folder, purge_step=step)
        for name, value in numbers_of(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def on_end(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class WandB(_ForLines):
    """A hook that logs the numbers of each line of metrics to Weights & Biases (W&B).

    Args:
        init: arguments of ``wandb.init``, which is called with the first line of metrics. With an
            ``id`` and ``resume="allow"``, a resumed run goes on with the same curves. Steps that
            are done again after a crash are already there, and W&B leaves them out.

    Raises:
        ConfigError: the package wandb is missing.

    Examples:
        >>> from mmstream.train import TrainConfig, WandB, train  # doctest: +SKIP
        >>> wandb = WandB(project="captions", id="run-7", resume="allow")  # doctest: +SKIP
        >>> train(TrainConfig("shards/", "run/"), hooks=[wandb])  # doctest: +SKIP
    """

    def __init__(self, **init: Any) -> None:
        self._package = _imported("wandb", "wandb")
        self._init = init
        self._run: Any = None

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the numbers of a line of metrics, as `TensorBoard.on_step` writes them."""
        if metrics.get("rank"):
            return
        if self._run is None:
            self._run = self._package.init(**self._init)
        self._run.log(numbers_of(metrics), step=step)

    def on_end(self) -> None:
        """Finish the run of W&B."""
        if self._run is not None:
            self._run.finish()


class Prometheus(_ForLines):
    """A hook that writes the newest numbers of this rank as a text file for Prometheus.

    The file is ``mmstream-rank{r}.prom``, for the textfile collector of the node exporter. It is
    replaced as a whole. Each number is a gauge: ``mmstream_wait_fraction{rank="0"} 0.02``, and
    ``mmstream_bad{rank="0",name="DecodeError"} 3`` where metrics have a dict. The format is that of
    https://prometheus.io/docs/instrumenting/exposition_formats/.

    Args:
        folder: local folder of the file.

    Examples:
        >>> from pathlib import Path
        >>> from mmstream.train import Prometheus
        >>> Prometheus(".").on_step(1, {"loss": 0.5, "bad": {"DecodeError": 3}})
        >>> print(Path("mmstream-rank0.prom").read_text(), end="")
        # TYPE mmstream_loss gauge
        mmstream_loss{rank="0"} 0.5
        # TYPE mmstream_bad gauge
        mmstream_bad{rank="0",name="DecodeError"} 3.0
        # TYPE mmstream_num_steps gauge
        mmstream_num_steps{rank="0"} 1.0
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._numbers: dict[str, float] = {}

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of a line of metrics, which has its ``rank``; without one it is 0."""
        new = tuple(f"{name}/" for name, value in metrics.items() if isinstance(value, Mapping))
        kept = {name: value for name, value in self._numbers.items() if not name.startswith(new)}
        self._numbers = kept | numbers_of({**metrics, "num_steps": step})
        rank = metrics.get("rank", 0)
        lines_of: dict[str, list[str]] = {}
        for name, value in self._numbers.items():
            metric, _, label = name.partition("/")
            metric = "mmstream_" + re.sub(r"\W", "_", metric, flags=re.ASCII)
            lines = lines_of.setdefault(metric, [f"# TYPE {metric} gauge\n"])
            labels = f'rank="{rank}"'
            if label:
                escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
                labels += f',name="{label.translate(escapes)}"'
            lines.append(f"{metric}{{{labels}}} {float(value)}\n")
        path = self._folder / f"mmstream-rank{rank}.prom"
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        text = "".join(line for lines in lines_of.values() for line in lines)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of metrics by name, without texts, lists and None.

    Examples:
        >>> numbers_of({"loss": 0.5, "fill": None, "sources": {"web": 12}})
        {'loss': 0.5, 'sources/web': 12}
    """
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        of_name = value if isinstance(value, Mapping) else None
        flat |= {name: value} if of_name is None else {f"{name}/{k}": v for k, v in of_name.items()}
    return {name: value for name, value in flat.items() if isinstance(value, (int, float))}


def _imported(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"pip install {package}: it is not installed ({error})") from error

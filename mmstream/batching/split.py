"""Cuts a delivered batch: by rows into micro-batches, or along its tokens.

Place in the flow: between device and training. `split_rows` makes views of a batch on any device,
for one that cannot take all rows at once. So fewer ranks can train on the same global batch: each
accumulates gradients over more micro-batches. `cut_sequence` is for context parallelism.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from mmstream.batching.valid import has_token_labels, is_flat
from mmstream.errors import ConfigError
from mmstream.reading.step import BatchLineage
from mmstream.settings import NonNegativeInt, PositiveInt, checked, refuse_broken
from mmstream.storage.transfers import TransferCounts
from mmstream.types import IGNORED_LABEL, Batch, IntArray, SampleRef


@checked()
def split_rows(
    batch: Batch, num_parts: PositiveInt | None = None, *, max_tokens: PositiveInt | None = None
) -> list[Batch]:
    """Cut a batch by rows into micro-batches of equal size, plus or minus one row.

    With `max_tokens` a batch of `mm.Flat` or `mm.Pack` is cut by its number of tokens instead.

    - A field with one entry per row is cut by rows.
    - A ragged field has a companion, a tensor that names the row of each entry, as ``image`` has
      ``image_row``. It is cut where its rows end. In each micro-batch the companion counts rows
      from 0. On CUDA, reading the companion makes the host wait for the device.
    - ``video`` is cut where a video ends that is the last one of its rows, and so are the times of
      its frames. The companions of videos and recordings go with them.
    - A batch of documents is cut between rows. ``cu_seq_lens_q`` and all that counts tokens,
      documents, samples or rows begins at 0 in each micro-batch. ``num_tokens`` and
      ``num_label_tokens`` are those of the micro-batch. One without a token gets a token of
      padding.
    - A dict is cut field by field.
    - Single numbers, strings and None are repeated in each micro-batch.
    - ``__lineage__`` describes the rows of the micro-batch. Bytes and requests of the whole
      batch are counted in the first one.

    - Rows of a repeated sample stay together. Their samples are shared out in place of rows.

    Args:
        batch: A batch from a loader or from `mmstream.to_device`.
        num_parts: Number of micro-batches, from 1 up. A batch with fewer rows gives one per row.
        max_tokens: The most tokens of a micro-batch, from 1 up, for a batch of documents. A row
            with more is a micro-batch by itself. Then the number of micro-batches differs from rank
            to rank, and FSDP would wait for ever: all-reduce its maximum, and give it as
            `num_parts`. The rest is filled up with empty micro-batches of one padding token.

    Returns:
        The micro-batches in the order of rows. Together they are the batch. Tensors are views:
        nothing is copied.

    Raises:
        ConfigError: A number is below 1, or none is given. Or `max_tokens` is given for a batch
            that is padded, or needs more micro-batches than `num_parts`. Or a field has neither one
            entry per row nor a companion. Or a companion does not list its rows in order.

    Examples:
        >>> batch = {"__valid__": torch.tensor([True] * 5), "input_ids": torch.arange(5)}
        >>> [micro_batch["input_ids"].tolist() for micro_batch in split_rows(batch, 2)]
        [[0, 1], [2, 3, 4]]
    """
    refuse_broken(
        (
            "__valid__" not in batch,
            "split_rows: the batch has no __valid__: pass a batch of a loader",
        ),
        (
            "sequence_index" in batch,
            "split_rows: the batch is a part of mm.cut_sequence: split first, then cut",
        ),
        (
            num_parts is None and max_tokens is None,
            "split_rows: give num_parts, or max_tokens= for batches of documents",
        ),
        (
            max_tokens is not None and not is_flat(batch),
            "split_rows: max_tokens= is for batches of mm.Flat or mm.Pack; give num_parts",
        ),
    )
    if max_tokens is not None:
        return _split(batch, cuts_by_tokens(batch, max_tokens, num_parts))
    assert num_parts is not None
    repeat = int(batch["__repeat__"].max()) + 1 if "__repeat__" in batch else 1
    num_rows = len(batch["__valid__"]) // repeat
    num_parts = max(1, min(num_parts, num_rows))
    # Example: 5 rows in 2 micro-batches have the cuts [0, 2, 5].
    cuts = [i * num_rows // num_parts * repeat for i in range(num_parts + 1)]
    return _split(batch, cuts)


def _split(fields: dict[str, Any], cuts: list[int]) -> list[dict[str, Any]]:
    """Cut all fields of a batch. Rows cuts[i] to cuts[i + 1] go to micro-batch i."""
    if not is_flat(fields):
        return _split_fields(fields, cuts, cuts)
    flat = FlatCuts(fields, cuts)
    micro_batches = flat.fields_of_tokens()
    other_fields = {name: value for name, value in fields.items() if name not in micro_batches[0]}
    others = _split_fields(other_fields, cuts, flat.entries)
    for number, (micro_batch, other) in enumerate(zip(micro_batches, others, strict=True)):
        for name in other:
            if name.endswith("_document") and f"{name.removesuffix('_document')}_row" in other:
                other[name] = other[name] - flat.documents[number]
        micro_batch |= other
    return micro_batches


def _split_fields(
    fields: dict[str, Any], cuts: list[int], entry_cuts: list[int]
) -> list[dict[str, Any]]:
    """Cut fields by rows, and those with one entry per document at `entry_cuts`.

    Without documents these are the same cuts.
    """
    micro_batches: list[dict[str, Any]] = [{} for _ in cuts[1:]]
    ragged_cuts = _cuts_of_ragged_fields(fields, cuts)
    for name, value in fields.items():
        if name in ragged_cuts:
            slices = _slices(value, ragged_cuts[name])
        elif name in FIELDS_OF_ROWS:
            slices = _slices_by_row(name, value, cuts)
        else:
            slices = _slices_by_row(name, value, entry_cuts)
        numbered = cuts if name.endswith("_row") else ragged_cuts.get(_videos_of(name))
        if name in ragged_cuts and numbered is not None:
            slices = [
                from_zero(numbers, start) for numbers, start in zip(slices, numbered, strict=False)
            ]
        for micro_batch, micro_value in zip(micro_batches, slices, strict=True):
            micro_batch[name] = micro_value
    return micro_batches


def _cuts_of_ragged_fields(fields: dict[str, Any], cuts: list[int]) -> dict[str, list[int]]:
    """Return where each field is cut that has a companion, or is one.

    Example: videos of the rows [0, 0, 1] with [2, 1, 3] frames, cut at the rows [0, 1, 2]. The rows
    and the numbers of frames are cut at [0, 2, 3], the frames and their times at [0, 3, 6].
    """
    ragged: dict[str, list[int]] = {}
    for companion, rows in fields.items():
        name = companion.removesuffix("_row")
        features = f"{name}_features"
        is_companion = companion.endswith("_row") and isinstance(rows, torch.Tensor)
        if not is_companion or not (name in fields or features in fields):
            continue
        entries = _ragged_cuts(companion, rows, cuts)
        ragged |= {companion: entries, name: entries}
        lengths = (features, f"{features}_length", f"{name}_length", f"{name}_video")
        rates = (f"{name}_fps", f"{name}_requested_fps")
        ragged |= {
            length: entries
            for length in (*lengths, *rates, f"{name}_document")
            if isinstance(fields.get(length), torch.Tensor | list)
            and len(fields[length]) == len(rows)
        }
        frames, times = f"{name}_frames", f"{name}_pts_s"
        if times in fields and isinstance(fields.get(frames), torch.Tensor):
            starts = list(accumulate(fields[frames].tolist(), initial=0))
            frame_cuts = [starts[entry] for entry in entries]
            ragged |= {frames: entries, times: frame_cuts}
            if isinstance(fields[name], torch.Tensor):
                ragged[name] = frame_cuts
    return ragged


def _videos_of(name: str) -> str:
    """Return the companion of the videos that a field numbers: ``audio_video`` and ``video_row``.

    Tracks of ``mp4`` are in ``mp4_audio``. "": the field numbers no videos.
    """
    if not name.endswith("audio_video"):
        return ""
    return f"{name.removesuffix('audio_video').removesuffix('_') or 'video'}_row"


def _slices_by_row(name: str, value: Any, cuts: list[int]) -> list[Any]:
    """Cut a field that has one entry per row, or repeat a single value."""
    if isinstance(value, BatchLineage):
        return [_lineage_of_rows(value, start, stop) for start, stop in pairwise(cuts)]
    if isinstance(value, dict):
        return _split_fields(value, cuts, cuts)
    has_rows = isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim > 0)
    if not has_rows:
        return [value] * (len(cuts) - 1)
    if len(value) != cuts[-1]:
        raise ConfigError(
            f"split_rows: {name} has {len(value)} entries for {cuts[-1]} rows or documents; a "
            f"ragged field needs {name}_row, the row of each entry"
        )
    return _slices(value, cuts)


def _slices(value: Any, cuts: list[int]) -> list[Any]:
    return [value[start:stop] for start, stop in pairwise(cuts)]


def _ragged_cuts(companion: str, rows_of_entries: torch.Tensor, cuts: list[int]) -> list[int]:
    """Return where a ragged field is cut, so that row cuts[i] starts a slice.

    Example: entries of the rows [0, 0, 1, 3], cut at the rows [0, 2, 4], are cut at [0, 3, 4].
    """
    rows = rows_of_entries.tolist()
    if rows != sorted(rows):
        raise ConfigError(f"split_rows: {companion} does not rise from row to row")
    return [bisect_left(rows, cut) for cut in cuts]


def _lineage_of_rows(lineage: BatchLineage, start: int, stop: int) -> BatchLineage:
    start, stop = start // lineage.repeat, stop // lineage.repeat
    order_rows = [lineage.order_row(row) for row in range(start, stop)]
    planned, planned_rows = _samples_of_rows(lineage.planned, lineage.planned_rows, start, stop)
    shown, rows = _samples_of_rows(lineage.shown, lineage.rows, start, stop)
    return dataclasses.replace(
        lineage,
        start=lineage.start + start,
        planned=planned,
        planned_rows=planned_rows,
        valid=lineage.valid[start:stop],
        shown=shown,
        rows=rows,
        order_rows=None if lineage.order_rows is None else order_rows,
        bad=tuple(record for record in lineage.bad if record.row in order_rows),
        num_cut_texts=0 if start else lineage.num_cut_texts,
        num_dropped_parts=0 if start else lineage.num_dropped_parts,
        text_losses=() if start else lineage.text_losses,
        num_bytes=0 if start else lineage.num_bytes,
        num_requests=0 if start else lineage.num_requests,
        transfers=TransferCounts() if start else lineage.transfers,
    )


def _samples_of_rows(
    refs: list[SampleRef], rows: list[int] | None, start: int, stop: int
) -> tuple[list[SampleRef], list[int] | None]:
    """Return the samples of some rows, and their rows counted from the first of these."""
    if rows is None:
        return refs[start:stop], None
    cuts = slice(bisect_left(rows, start), bisect_left(rows, stop))
    return refs[cuts], [row - start for row in rows[cuts]]


# -- batches without padding -----------------------------------------------------------------------

FIELDS_OF_ROWS = ("__valid__", "__lineage__")
"""Fields of a flat batch with one entry per row. Those of padded batches are cut by rows all."""

_TOKEN_FIELDS = ("input_ids", "labels", "label_weights", "position_ids", "document_ids")
_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k")
_FILLS = {"labels": IGNORED_LABEL, "label_weights": 0, "position_ids": 0, "document_ids": 0}
"""What a token of padding has in a micro-batch that would have none."""


class FlatCuts:
    """The cuts of a flat batch. On CUDA, the host waits for the device to know them.

    Args:
        batch: A batch of `flatten`.
        cuts: Rows cuts[i] to cuts[i + 1] go to micro-batch i.

    Attributes:
        entries: Where fields are cut that have one entry per document without padding.
        documents: The first document of each micro-batch, and after the last.
    """

    def __init__(self, batch: Batch, cuts: Sequence[int]) -> None:
        self._batch = batch
        self._rows = list(cuts)
        starts = batch["cu_seq_lens_q"].numpy(force=True).astype(np.int64)
        self._samples = batch["document_sample"].numpy(force=True)
        is_sample = self._samples >= 0
        # Example: documents of the rows [0, 0, 2], cut at the rows [0, 1, 3], are cut at [0, 2, 3].
        documents = np.searchsorted(batch["document_row"].numpy(force=True), cuts)
        self.documents: list[int] = documents.tolist()
        self._tokens: list[int] = starts[documents].tolist()
        self.entries: list[int] = _sums_before(is_sample)[documents].tolist()
        sums = _sums_before(np.diff(starts) * is_sample)
        self._num_tokens: list[int] = np.diff(sums[documents]).tolist()
        self._has_rows = batch["input_ids"].shape[0] == len(batch["__valid__"])

    def fields_of_tokens(self) -> list[Batch]:
        """Return the fields of tokens and documents of each micro-batch. Tensors are views.

        A micro-batch without a token gets one of padding, so that a model can run on it.
        """
        return [
            self._micro_batch(number) if stop > start else self._padding(number)
            for number, (start, stop) in enumerate(pairwise(self._tokens))
        ]

    def _micro_batch(self, number: int) -> Batch:
        batch = self._batch
        first, stop = self.documents[number : number + 2]
        fields = {
            name: self._tokens_of(batch[name], number) for name in _TOKEN_FIELDS if name in batch
        }
        fields["document_ids"] = fields["document_ids"] - first
        for name in _BORDERS:
            fields[name] = batch[name][first : stop + 1] - self._tokens[number]
        fields["document_row"] = batch["document_row"][first:stop] - self._rows[number]
        samples = batch["document_sample"][first:stop]
        num_before = next((int(n) for n in self._samples[first:stop] if n >= 0), 0)
        fields["document_sample"] = from_zero(samples, num_before)
        return fields | self._counts(number, fields.get("labels"))

    def _tokens_of(self, values: torch.Tensor, number: int) -> torch.Tensor:
        if self._has_rows:  # [B, T], or [4, B, T]
            start, stop = self._rows[number : number + 2]
            return values.narrow(values.ndim - 2, start, stop - start)
        start, stop = self._tokens[number : number + 2]
        return values[..., start:stop]

    def _padding(self, number: int) -> Batch:
        """Return the fields of one padding document. Its token is the first of the batch."""
        batch = self._batch
        fields: Batch = {}
        for name in _TOKEN_FIELDS:
            if name in batch:
                token = batch[name][..., :1, :1]
                fields[name] = torch.full_like(token, _FILLS[name]) if name in _FILLS else token
        rows, borders = batch["document_row"], batch["cu_seq_lens_q"]
        fields |= dict.fromkeys(_BORDERS, torch.arange(2, dtype=borders.dtype, device=rows.device))
        # A micro-batch without a row has none for its padding either.
        has_rows = self._rows[number] < self._rows[number + 1]
        fields["document_row"] = rows.new_full((1,), 0 if has_rows else -1)
        fields["document_sample"] = rows.new_full((1,), -1)
        return fields | self._counts(number, fields.get("labels"))

    def _counts(self, number: int, labels: torch.Tensor | None) -> Batch:
        counts: Batch = {"num_tokens": self._num_tokens[number]}
        if labels is not None:
            counts["num_label_tokens"] = int((labels != IGNORED_LABEL).sum())
        return counts


def from_zero(numbers: torch.Tensor, start: int) -> torch.Tensor:
    """Count rows, samples or videos of a micro-batch from 0. -1 means none."""
    return torch.where(numbers < 0, numbers, numbers - start)


def cuts_by_tokens(batch: Batch, max_tokens: int, num_parts: int | None) -> list[int]:
    """Return where a flat batch is cut, so that no micro-batch of several rows has more tokens.

    Example: rows of 5, 3, 4 and 9 tokens with at most 8 tokens are cut at [0, 2, 3, 4]. With 5
    micro-batches the cuts are [0, 2, 3, 4, 4, 4]: the last two are empty.
    """
    num_rows = len(batch["__valid__"])
    lengths = np.diff(batch["cu_seq_lens_q"].numpy(force=True))
    rows = batch["document_row"].numpy(force=True)
    row_tokens = np.bincount(rows, weights=lengths, minlength=num_rows).astype(np.int64)
    cuts, size = [0], 0
    for row, num_tokens in enumerate(row_tokens.tolist()):
        if size and size + num_tokens > max_tokens:
            cuts.append(row)
            size = 0
        size += num_tokens
    cuts.append(num_rows)
    if num_parts is None:
        return cuts
    if len(cuts) - 1 > num_parts:
        raise ConfigError(
            f"split_rows: {len(cuts) - 1} micro-batches of {max_tokens} tokens, and "
            f"num_parts={num_parts}: give the largest number of all ranks, which each has from "
            "len(split_rows(batch, max_tokens=...))"
        )
    return cuts + [num_rows] * (num_parts - len(cuts) + 1)


def _sums_before(values: Any) -> Any:
    """Return the sums of the values before each position, and the whole: [3, 1] gives [0, 3, 4]."""
    return np.concatenate(([0], np.cumsum(values)))


# -- along its tokens, for context parallelism -----------------------------------------------------
#
# The ranks of a context-parallel group need the same batch, and each of them keeps a part of the
# tokens of every row. Attention sees the whole.

Scheme: TypeAlias = Literal["document-zigzag", "row-zigzag", "contiguous"]
"""How tokens are dealt to the ranks of a context-parallel group."""

_SEQUENCE_FIELDS = (
    *("input_ids", "attention_mask", "token_type_ids", "position_ids", "document_ids"),
    *("shift_labels", "shift_label_weights"),
)
"""Fields of [..., B, T]."""

_EMBEDDINGS = "inputs_embeds"
"""[B, T, D]."""


@checked(late=True)
def shift_labels(batch: Batch) -> Batch:
    """Return a batch with the next token of each position in place of its labels.

    A part of a row does not know the token after its end, so labels are shifted before they are
    cut. `cut_sequence` does it by itself.

    Args:
        batch: A batch from a loader or from `mmstream.to_device`. It does not change.

    Returns:
        The same fields with ``shift_labels``, int64 [B, T], in place of ``labels``: -100 where no
        token follows in the same row or document. And ``shift_label_weights``, float32 [B, T], in
        place of ``label_weights``. A batch without a label for each token is returned as it is.

    Examples:
        >>> ids = torch.tensor([[5, 6, 7]])
        >>> shift_labels({"input_ids": ids, "labels": ids})["shift_labels"].tolist()
        [[6, 7, -100]]
    """
    if not has_token_labels(batch):
        return batch
    shifted = dict(batch)
    # The first label of a document is -100, so each document ends with -100.
    labels = F.pad(shifted.pop("labels"), (0, 1), value=IGNORED_LABEL)
    shifted["shift_labels"] = labels[..., 1:].contiguous()
    if isinstance(batch.get("label_weights"), torch.Tensor):
        weights = F.pad(shifted.pop("label_weights"), (0, 1))
        shifted["shift_label_weights"] = weights[..., 1:].contiguous()
    return shifted


@checked({"batch": "give a batch of a loader, with input_ids [B, T]"})
def cut_sequence(
    batch: Batch, rank: NonNegativeInt, size: PositiveInt, scheme: Scheme = "document-zigzag"
) -> Batch:
    """Return a rank's part of the tokens of a batch, for context parallelism.

    Causal attention costs most at the end of a document. So a zigzag cuts it into 2 x `size` chunks
    of equal length, and rank r gets chunk r and chunk 2 x `size` - 1 - r::

        tokens     0 1 2 3 4 5 6 7        size 2
        rank 0     0 1         6 7
        rank 1         2 3 4 5

    - "document-zigzag" cuts each document of `mm.Flat` and `mm.Pack` so, as Transformer Engine,
      Megatron and ring-flash-attention do for documents. In a padded batch it cuts rows.
    - "row-zigzag" cuts each row of the token fields so, all of ``[1, T]`` where they are flat:
      torch's ``context_parallel`` and its head-tail load balancer.
    - "contiguous" gives rank r the r-th of `size` equal pieces of each row.

    Fields of tokens are cut, and so is ``inputs_embeds`` [B, T, D]. All other fields stay whole:
    media, rows and keys, and also the lengths, ``cu_seq_lens_q`` to ``num_label_tokens``. So embed
    media first, with the whole ``input_ids``: put ``inputs_embeds`` into the batch, then cut.

    Args:
        batch: A batch from a loader or from `mmstream.to_device`, the same on all ranks of the
            group. It does not change. On CUDA, the host waits for the lengths of documents.
        rank: The rank within its context-parallel group.
        size: Number of ranks of the group.
        scheme: How tokens are dealt to them.

    Returns:
        The fields of the batch. ``sequence_index``, int64 [B, T / size], says where in its row each
        token of the part lies: the parts of all ranks side by side, sorted by it, are the whole.
        Labels are ``shift_labels``, see `shift_labels`. A padded batch gets ``position_ids``, int64
        [B, T / size].

    Raises:
        ConfigError: A document or a row cannot be cut into equal chunks. Or the batch is a part
            already, or has no ``input_ids``. Or a field of tokens has another shape.

    Examples:
        >>> batch = {"input_ids": torch.arange(8).view(1, 8)}
        >>> [cut_sequence(batch, rank, 2)["input_ids"].tolist() for rank in range(2)]
        [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    """
    if rank >= size:
        raise ConfigError(f"cut_sequence: rank {rank} of size {size}: give 0 to {size - 1}")
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or "sequence_index" in batch:
        advice = "it is cut already" if "sequence_index" in batch else "it has no input_ids [B, T]"
        raise ConfigError(f"cut_sequence: {advice}: pass a batch of a loader")
    part = dict(shift_labels(batch))
    num_rows, num_tokens = ids.shape
    # Without positions a model would count those of each part from 0.
    part.setdefault("position_ids", torch.arange(num_tokens, device=ids.device).expand(ids.shape))
    tokens = torch.from_numpy(_tokens_of_rank(_borders(batch, ids, scheme), rank, size, scheme))
    index = (tokens.view(num_rows, num_tokens // size) % max(1, num_tokens)).to(ids.device)
    for name in (*_SEQUENCE_FIELDS, _EMBEDDINGS):
        values = part.get(name)
        if isinstance(values, torch.Tensor):
            part[name] = _cut(name, values, index, ids.shape)
    return part | {"sequence_index": index}


def _cut(name: str, values: torch.Tensor, index: torch.Tensor, rows: torch.Size) -> torch.Tensor:
    """Return the tokens of a field by their places in its rows, int64 [B, T / size]."""
    width = values.shape[-1:] if name == _EMBEDDINGS else ()
    shape = values.shape[: values.ndim - len(width)]
    if shape[-2:] != rows:
        raise ConfigError(
            f"cut_sequence: {name} is {list(values.shape)}, and input_ids {list(rows)}: leave it "
            "out, or give it one entry for each token"
        )
    for _ in width:
        index = index[..., None]
    return values.gather(len(shape) - 1, index.expand(*shape[:-1], -1, *width))


def _borders(batch: Batch, ids: torch.Tensor, scheme: Scheme) -> IntArray:
    """Return where each of what is cut begins, and the end, in tokens of all rows: [N + 1]."""
    if scheme == "document-zigzag" and "cu_seq_lens_q" in batch:
        borders: IntArray = batch["cu_seq_lens_q"].numpy(force=True).astype(np.int64)
        return borders
    return np.arange(ids.shape[0] + 1) * ids.shape[1]


def _tokens_of_rank(borders: IntArray, rank: int, size: int, scheme: Scheme) -> IntArray:
    """Return the tokens of a rank, in tokens of all rows.

    Example: documents at [0, 4, 12], and rank 0 of 2 with a zigzag. The first one has chunks of 1
    token, and gives 0 and 3. The second one has chunks of 2, and gives 4, 5, 10 and 11.
    """
    num_chunks = size if scheme == "contiguous" else 2 * size
    lengths = np.diff(borders)
    if (uneven := np.flatnonzero(lengths % num_chunks)).size:
        number = int(uneven[0])
        is_document = scheme == "document-zigzag"
        times = "" if scheme == "contiguous" else "2 x "
        cure = f"mm.Flat(pad_to_multiple_of={num_chunks})"
        if is_document:
            cure = (
                f"mm.Flat(document_multiple_of={num_chunks}, pad_to_multiple_of={num_chunks}); "
                f"for packs mmstream plan --document-multiple-of {num_chunks}"
            )
        raise ConfigError(
            f"cut_sequence: {'document' if is_document else 'row'} {number} has "
            f"{lengths[number]:,} tokens, and {scheme} needs a multiple of {times}size = "
            f"{num_chunks}: pass {cure}; for padded rows mm.TextDecoder("
            'padding="max_length", max_length=)'
        )
    chunks = lengths // num_chunks
    starts = [borders[:-1] + rank * chunks]
    if scheme != "contiguous":
        starts.append(borders[1:] - (rank + 1) * chunks)
    # Chunks in the order of documents: the head and the tail of the first one, then of the second.
    firsts, counts = np.stack(starts, 1).ravel(), np.repeat(chunks, len(starts))
    places = np.repeat(firsts - np.cumsum(counts) + counts, counts)
    tokens: IntArray = places + np.arange(len(places))
    return tokens

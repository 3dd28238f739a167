"""Settings of batches that models take without padding: `Flat`, and `Pack` for planned rows.

Place in the flow: `Pipeline(batching=)` takes one of them, and `flat.flatten` makes batches by it.
None is what `collate` makes: one row per sample, padded to the longest.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from mmstream.errors import ConfigError
from mmstream.families.family import DocumentMedia
from mmstream.packing.cost import Cost
from mmstream.packing.settings import PackLimits
from mmstream.settings import NonNegativeInt, PositiveInt, checked
from mmstream.types import IntArray


@runtime_checkable
class Positions(Protocol):
    """A rule for positions of more than one dimension: those of text, time, height and width."""

    def __call__(self, input_ids: IntArray, media: DocumentMedia) -> IntArray:
        """Return the positions of a document of L tokens, int64 [3, L]: time, height, width."""


_ADVICE = {
    "positions": "give a rule, such as "
    "mm.families.qwen_vl.QwenVLPositions.from_config(model.config)",
    "cost": "give an mm.Cost, such as mm.Cost.from_config(model.config)",
}


@checked({"positions": _ADVICE["positions"]})
@dataclass(frozen=True)
class Flat:
    """Batches without padding: the documents of a rank one behind the other.

    A document is one text with its media. Its tokens see those before them in the same document,
    and no others. Each row of the batch is one sample.

    Attributes:
        layout: "flat": token fields are [1, T], of all rows together. "rows": they are [B, T], and
            each row is filled up with padding documents. The second is for attention that takes no
            lengths of documents: eager, sdpa and flex.
        pad_to_multiple_of: T is a multiple of this number of tokens.
        document_multiple_of: Each document is filled up to a multiple of this number of tokens,
            with tokens that have no labels. For context parallelism, which cuts each document. With
            packs it is that of the plan, which leaves room for it.
        pad_documents_to: Number of documents in ``cu_seq_lens_q``, for compiled models that need
            one shape. Documents without a token are added at the end. None: as many as there are.
        positions: A rule of models whose positions have several dimensions:
            `mm.families.qwen_vl.QwenVLPositions`.
            None: positions count the tokens of each document.
        first_position: The position of the first token of a document: 2 for models that count as
            RoBERTa does.

    Raises:
        ConfigError: A setting is none of those that it may be.

    Examples:
        >>> from mmstream.train.tokenizer import byte_tokenizer
        >>> pipeline = mm.Pipeline(
        ...     mm.open_dataset("shards/"),
        ...     global_batch_size=8,
        ...     decode=mm.Decode(text=mm.TextDecoder(byte_tokenizer())),
        ...     batching=mm.Flat(),
        ... )
        >>> batch = next(iter(mm.Loader(pipeline)))
        >>> batch["input_ids"].shape == (1, batch["num_tokens"])
        True
    """

    _: KW_ONLY
    layout: Literal["flat", "rows"] = "flat"
    pad_to_multiple_of: PositiveInt = 1
    document_multiple_of: PositiveInt = 1
    pad_documents_to: PositiveInt | None = None
    positions: Positions | None = None
    first_position: NonNegativeInt = 0


@checked(_ADVICE)
@dataclass(frozen=True)
class Pack(Flat):
    """Rows of several samples, packed by a plan. The other settings are those of `Flat`.

    A plan is made of the lengths of all samples, so the rows of every step are known before
    training. ``global_batch_size`` counts rows.

    Attributes:
        max_tokens: The most tokens of a row.
        plan: The plan: its name, its folder or URL, or an open one. None: the one that fits. With a
            mixture, each source has a plan: their common name, or a dict of them by source.
        weights_of: With a mixture: what its weights are proportions of. They are kept in the mean,
            because packs hold samples of one source each, and different numbers of them.
        limits: `PackLimits`: what a row may hold beside tokens. None: tokens alone.
        cost: What a row costs the model, by which rows are dealt to ranks. None: they are not
            dealt.
        deal: Which ranks share out their rows by cost. "all": all of them. "auto": all of them
            where the shards are local. On object storage only ranks that share lanes do, because
            others would read each other's ranges, and each of the others sorts its own rows. "off":
            none.

    Examples:
        >>> mm.Pack(8192, layout="rows").max_tokens
        8192
    """

    max_tokens: PositiveInt
    _: KW_ONLY
    plan: Any = None
    weights_of: Literal["samples", "tokens"] | None = None
    limits: PackLimits | None = None
    cost: Cost | None = None
    deal: Literal["auto", "all", "off"] = "auto"

    def __post_init__(self) -> None:
        if self.limits is not None and self.limits.max_tokens != self.max_tokens:
            raise ConfigError(
                f"mm.Pack({self.max_tokens}, limits=mm.PackLimits({self.limits.max_tokens})): rows "
                "have one length: give the same number to both"
            )
        if self.layout == "rows" and self.max_tokens % self.pad_to_multiple_of:
            raise ConfigError(
                f"max_tokens={self.max_tokens} is no multiple of "
                f"pad_to_multiple_of={self.pad_to_multiple_of}: rows are as long as max_tokens"
            )

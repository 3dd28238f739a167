"""The cost of a unit for a model, as a weighted sum of the numbers in its plan.

    plan.sums(units) -> `Cost.modelled` -> `deal`: which rank takes which row of a step

Only ratios count: nothing here knows how fast a machine is. A document of L tokens costs L times
the linear layers and L^2 times the attention, and a picture of p patches the same in the vision
tower. So two packs of equally many tokens cost differently: one text of 8,192 tokens has 16 times
the attention of 16 texts of 512.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from mmstream.errors import ConfigError
from mmstream.packing.plan import UnitSums
from mmstream.settings import NonNegativeFloat, checked
from mmstream.types import IntArray

_WINDOW_LAYERS = ("sliding_attention", "chunked_attention")
_TWO_MATRICES = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "mpt")
"""Language models whose MLP has two matrices. All newer ones have a gate, and so three."""
_GATED_TOWERS = ("qwen2_5_vl", "qwen2_5_omni_vision_encoder", "glm4v", "pixtral")
"""Beginnings of the `model_type` of vision towers whose MLP has a gate."""


@checked()
@dataclass(frozen=True)
class Cost:
    """The cost of a row: ``tokens * sum L + squared_tokens * sum L^2 + patches * sum p + ...``.

    Only ratios count, because a loader compares rows with each other.

    Args:
        tokens: cost of a token in the linear layers.
        squared_tokens: cost of a squared document length: attention.
        patches: cost of a patch in the linear layers of the vision tower.
        squared_patches: cost of the squared number of patches of a picture: its attention.

    Raises:
        ConfigError: a coefficient is not a number, is negative, or all of them are 0.

    Examples:
        >>> mm.Cost(tokens=1.0, squared_tokens=2e-5)
        Cost(tokens=1.0, squared_tokens=2e-05, patches=0.0, squared_patches=0.0)
    """

    tokens: NonNegativeFloat = 1.0
    squared_tokens: NonNegativeFloat = 0.0
    patches: NonNegativeFloat = 0.0
    squared_patches: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        if not any(astuple(self)):
            raise ConfigError("Cost: every coefficient is 0, so all rows would cost the same")

    @classmethod
    @checked(
        cure="Cost.from_config: the config does not state its sizes: give the coefficients, "
        "mm.Cost(tokens=..., squared_tokens=...)"
    )
    def from_config(cls, config: Any) -> Cost:
        """Return the floating-point operations of a model's forward pass.

        They are counted from the sizes in its `transformers` config: the matrices of all layers and
        of the output, and attention. The text attends to earlier tokens only, which is half of L^2.
        Layers with a sliding window, and all but the full-attention layers of Qwen2.5-VL's tower,
        cost a constant per token. Of a mixture of experts, the active ones count. The patch
        embedding, the projector and layers of linear attention beyond their matrices are left out.
        The backward pass multiplies all terms alike. Where the vision tower is frozen, its
        coefficients are a third of these.

        Args:
            config: ``model.config``, of a decoder with or without a vision tower.

        Raises:
            ConfigError: the config is of an encoder-decoder, or lacks the sizes.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigError(
                f"Cost.from_config: {type(config).__name__} is of an encoder-decoder, which takes "
                "no packs: give the coefficients, mm.Cost(tokens=..., squared_tokens=...)"
            )
        tower = getattr(config, "vision_config", None)
        return cls(*_text_operations(text), *(_tower_operations(tower) if tower else (0, 0)))

    def modelled(self, sums: UnitSums) -> IntArray:
        """Return int64 [n], the cost of each unit, in 1/1024 of the largest coefficient.

        Whole numbers, because all ranks must sort and add up alike: a tie that falls otherwise on
        one rank would train one row twice and another one never.
        """
        columns = (sums.num_tokens, sums.squared_tokens, sums.patches, sums.squared_patches)
        coefficients = astuple(self)
        total = np.zeros(len(columns[0]))
        for coefficient, column in zip(coefficients, columns, strict=True):
            total = total + coefficient / max(coefficients) * np.asarray(column)
        return np.rint(1024 * total).astype(np.int64)


def _text_operations(config: Any) -> tuple[float, float]:
    """Return operations per token, and per squared length of a document."""
    width, num_layers = config.hidden_size, config.num_hidden_layers
    num_heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or width // num_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    attention = 2 * width * head * (2 * num_heads + 2 * num_kv_heads)
    linear = num_layers * attention + sum(_mlp_operations(config, n) for n in range(num_layers))
    linear += 2 * width * config.vocab_size
    window = getattr(config, "sliding_window", None) or getattr(
        config, "attention_chunk_size", None
    )
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        has_window = window and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if has_window else "full_attention"] * num_layers
    num_windows = sum(kind in _WINDOW_LAYERS for kind in kinds) if window else 0
    num_full = sum(kind == "full_attention" for kind in kinds)
    # q k^T and the sum of values: 2 operations each for every head dimension and pair of tokens.
    linear += num_windows * 4 * num_heads * head * (window or 0)
    return float(linear), float(num_full * 4 * num_heads * head / 2)


def _mlp_operations(config: Any, layer: int) -> int:
    """Return operations per token of the MLP of a layer: 2 per weight that a token meets."""
    width: int = config.hidden_size
    inner: int = (
        getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * width
    )
    num_matrices = 2 if getattr(config, "model_type", "") in _TWO_MATRICES else 3
    dense = 2 * num_matrices * width * inner
    num_active: int | None = getattr(config, "num_experts_per_tok", None)
    is_dense = (
        layer in (getattr(config, "mlp_only_layers", None) or ())
        or layer < (getattr(config, "first_k_dense_replace", None) or 0)
        or (layer + 1) % (getattr(config, "decoder_sparse_step", None) or 1)
    )
    if not num_active or is_dense:
        return dense
    expert: int = getattr(config, "moe_intermediate_size", None) or inner
    shared: int | None = getattr(config, "shared_expert_intermediate_size", None)
    if shared is None:
        shared = (getattr(config, "n_shared_experts", None) or 0) * expert
    return 2 * num_matrices * width * (num_active * expert + shared)


def _tower_operations(config: Any) -> tuple[float, float]:
    """Return operations per patch, and per squared number of patches of a picture."""
    # In Qwen2-VL's tower hidden_size is the width of its output, and embed_dim its own.
    width = getattr(config, "embed_dim", None) or config.hidden_size
    num_layers = getattr(config, "depth", None) or config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None) or width * config.mlp_ratio
    is_gated = str(getattr(config, "model_type", "")).startswith(_GATED_TOWERS)
    linear = num_layers * 2 * width * (4 * width + (3 if is_gated else 2) * inner)
    full_layers = getattr(config, "fullatt_block_indexes", None)
    num_full = num_layers if full_layers is None else len(full_layers)
    if full_layers is not None:
        window_patches = (config.window_size // config.patch_size) ** 2
        linear += (num_layers - num_full) * 4 * width * window_patches
    return float(linear), float(num_full * 4 * width)


# -- which rank takes which row of a step ----------------------------------------------------------
#
# It changes who trains on a row, and nothing else: the rows of a step, their substitutes and their
# random draws are the order's. So it is not part of a state, and may change at every resume.


def deal(costs: IntArray, num_ranks: int, among: int | None = None) -> IntArray:
    """Return int64 [G], the row at each position: rank r takes positions [r G/W, (r + 1) G/W).

    The rows are sorted by falling cost and dealt W at a time. Each time the rank that has least so
    far gets the most costly one. Ties go by row and rank number. So the sums of the ranks are close
    to each other, and so are the rows that all ranks have at the same micro-step. No other deal has
    a smaller sum of the most costly rows over the micro-steps: what a step takes where ranks wait
    for each other at every micro-step.

    Args:
        costs: int64 [G], the cost of each row.
        num_ranks: W. It must divide G.
        among: neighbouring ranks that share out the rows between them which are theirs undealt.
            None: all ranks. It must divide W.

    Raises:
        ConfigError: W does not divide G, or `among` does not divide W.

    Examples:
        Two ranks. 9 and 8 are dealt first, then 6 and 7, because the first rank has more. After
        that both have 15:

        >>> costs = np.array([9, 6, 5, 1, 7, 8])
        >>> costs[deal(costs, 2)].reshape(2, 3)
        array([[9, 6, 5],
               [8, 7, 1]])
    """
    num_rows, among = len(costs), num_ranks if among is None else among
    if min(num_ranks, among) < 1 or num_rows % num_ranks or num_ranks % among:
        raise ConfigError(
            f"deal: {num_rows} rows do not divide by {num_ranks} ranks, among {among} at a time"
        )
    blocks = costs.reshape(num_ranks // among, -1)
    dealt = [_dealt(block, among) + number * block.size for number, block in enumerate(blocks)]
    return np.concatenate(dealt)


def _dealt(costs: IntArray, num_ranks: int) -> IntArray:
    """Return the row at each position of ranks that share out their rows."""
    rounds = np.argsort(-costs, kind="stable").reshape(-1, num_ranks)
    dealt = np.empty((num_ranks, len(rounds)), dtype=np.int64)
    totals = np.zeros(num_ranks, dtype=np.int64)
    for number, rows in enumerate(rounds):
        ranks = np.argsort(totals, kind="stable")
        dealt[ranks, number] = rows
        totals[ranks] += costs[rows]
    return dealt.reshape(-1)


def imbalance(costs: IntArray, num_ranks: int) -> float:
    """Return the largest cost of a rank over the mean of all, from 1: ranks wait once a step.

    Args:
        costs: int64 [G], the cost of the row at each position.
        num_ranks: W. It must divide G.
    """
    totals = costs.reshape(num_ranks, -1).sum(axis=1)
    total = int(totals.sum())
    return int(totals.max()) * num_ranks / total if total else 1.0

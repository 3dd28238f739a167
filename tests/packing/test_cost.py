"""What a unit costs a model, and which rank takes which row: rows are dealt by their cost."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import mmstream as mm
from mmstream.errors import ConfigError
from mmstream.families.family import import_torchvision
from mmstream.packing.cost import deal, imbalance

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "max_position_embeddings": 4096,
}
TOWER = {"depth": 24, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2}


def config(kind: str, **settings: Any) -> Any:
    import_torchvision()
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind](**settings)


def sums(**columns: list[int]) -> Any:
    names = ("num_tokens", "squared_tokens", "patches", "squared_patches")
    size = len(next(iter(columns.values())))
    return SimpleNamespace(**{n: np.asarray(columns.get(n, [0] * size)) for n in names})


def operations_of(model: Any, *args: Any, **inputs: Any) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*args, **inputs)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt2"])
def test_operations_of_a_language_model_are_those_that_torch_counts(kind: str) -> None:
    import torch

    settings = dict(TEXT, attn_implementation="eager")
    if kind == "gemma2":
        settings |= {"layer_types": ["full_attention"] * 3, "head_dim": 16, "sliding_window": 4096}
    if kind == "gpt2":
        settings["n_inner"] = settings.pop("intermediate_size")
        del settings["num_key_value_heads"]
    sizes = config(kind, **settings)
    cost = mm.Cost.from_config(sizes)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(sizes).eval()
    for length in (32, 256):
        counted = operations_of(model, torch.zeros(1, length, dtype=torch.long), use_cache=False)
        # Eager attention computes all pairs, and half of them are masked.
        ours = cost.tokens * length + 2 * cost.squared_tokens * length**2
        assert ours == pytest.approx(counted, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_operations_of_a_vision_tower_are_those_that_torch_counts(kind: str) -> None:
    import torch
    from transformers import AutoModel

    tower = dict(TOWER, hidden_size=64)
    if kind == "qwen2_vl":
        tower |= {"embed_dim": 64, "mlp_ratio": 4}
    else:
        tower |= {"intermediate_size": 160, "out_hidden_size": 64}
    if kind == "qwen2_5_vl":
        tower |= {"fullatt_block_indexes": [5, 11, 17, 23], "window_size": 112}
    if kind == "qwen3_vl":
        tower |= {"deepstack_visual_indexes": [], "num_position_embeddings": 256}
    sizes = config(kind, text_config=dict(TEXT), vision_config=tower)
    cost = mm.Cost.from_config(sizes)
    sizes._attn_implementation = "eager"
    model = AutoModel.from_config(sizes, attn_implementation="eager").visual.eval()
    for side in (16, 32):
        grid = torch.tensor([[1, side, side]])
        pixels = torch.zeros(side * side, 3 * 2 * 14 * 14)
        counted = operations_of(model, pixels, grid_thw=grid)
        ours = cost.patches * side**2 + cost.squared_patches * side**4
        assert ours == pytest.approx(counted, rel=0.1)  # without the embedding and the merger


def test_of_a_mixture_of_experts_the_active_ones_count() -> None:
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 80, "decoder_sparse_step": 1}
    sparse = config("qwen3_moe", **TEXT, **experts, num_experts=8, head_dim=16)
    dense = config("qwen3", **TEXT, head_dim=16)  # 2 experts of 80 are an MLP of 160
    assert mm.Cost.from_config(sparse) == mm.Cost.from_config(dense)
    experts = {"num_experts_per_tok": 2, "num_local_experts": 8}
    sparse = config("mixtral", **{**TEXT, "intermediate_size": 80}, **experts)
    assert mm.Cost.from_config(sparse) == mm.Cost.from_config(config("llama", **TEXT))


def test_layers_with_windows_cost_a_constant_per_token() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    windowed = mm.Cost.from_config(
        config("gemma3_text", **TEXT, head_dim=16, layer_types=kinds, sliding_window=8)
    )
    full = mm.Cost.from_config(
        config("gemma3_text", **TEXT, head_dim=16, layer_types=["full_attention"] * 3)
    )
    assert windowed.squared_tokens == full.squared_tokens / 3
    assert windowed.tokens == full.tokens + 2 * 4 * 8 * 4 * 16


def test_a_text_config_has_no_cost_of_patches_and_a_vlm_has_one_of_each() -> None:
    text = mm.Cost.from_config(config("llama", **TEXT))
    assert (text.patches, text.squared_patches) == (0, 0)
    vlm = mm.Cost.from_config(config("llava", text_config=config("llama", **TEXT)))
    assert min(vlm.tokens, vlm.squared_tokens, vlm.patches, vlm.squared_patches) > 0
    assert vlm.tokens == text.tokens


def test_a_config_without_sizes_and_an_encoder_decoder_are_refused() -> None:
    with pytest.raises(mm.ConfigError, match="does not state its sizes: give the coefficients"):
        mm.Cost.from_config(SimpleNamespace(hidden_size=8))
    with pytest.raises(mm.ConfigError, match="WhisperConfig is of an encoder-decoder"):
        mm.Cost.from_config(config("whisper"))


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "2", None])
def test_a_coefficient_must_be_a_number_from_0(value: Any) -> None:
    with pytest.raises(mm.ConfigError, match=r"patches=.*[;:] give a number from 0 up"):
        mm.Cost(patches=value)


def test_a_cost_of_nothing_is_refused() -> None:
    with pytest.raises(mm.ConfigError, match="every coefficient is 0"):
        mm.Cost(tokens=0)


def test_a_unit_costs_the_weighted_sum_of_what_it_holds() -> None:
    cost = mm.Cost(tokens=2, squared_tokens=0.5, patches=3, squared_patches=0.25)
    units = sums(
        num_tokens=[10, 10], squared_tokens=[100, 50], patches=[0, 4], squared_patches=[0, 16]
    )
    thirds = [20 + 50, 20 + 25 + 12 + 4]
    assert cost.modelled(units).tolist() == [round(1024 * third / 3) for third in thirds]


def test_a_cost_of_the_longest_documents_fits_into_its_integers() -> None:
    units = sums(num_tokens=[2**20], squared_tokens=[2**40])
    assert mm.Cost(tokens=0, squared_tokens=7).modelled(units).tolist() == [2**50]


# -- rows of a step are dealt to the ranks by cost -------------------------------------------------


COSTS = st.integers(1, 12).flatmap(
    lambda ranks: st.integers(1, 6).flatmap(
        lambda rows: st.tuples(
            st.just(ranks),
            st.lists(st.integers(0, 50), min_size=ranks * rows, max_size=ranks * rows).map(
                partial(np.asarray, dtype=np.int64)
            ),
        )
    )
)


def slowest_at_each_micro_step(costs: np.ndarray, num_ranks: int) -> float:
    """What ranks take that wait for each other at each micro-step."""
    return float(costs.reshape(num_ranks, -1).max(axis=0).sum())


@given(COSTS)
def test_every_row_is_at_one_position_and_a_rank_has_its_rows_by_falling_cost(
    case: tuple[int, np.ndarray],
) -> None:
    num_ranks, costs = case
    positions = deal(costs, num_ranks)
    assert positions.dtype == np.int64
    assert sorted(positions.tolist()) == list(range(len(costs)))
    assert (np.diff(costs[positions].reshape(num_ranks, -1), axis=1) <= 0).all()
    assert deal(costs, num_ranks).tolist() == positions.tolist()


@given(COSTS)
def test_at_each_micro_step_all_ranks_have_neighbours_in_cost(case: tuple[int, np.ndarray]) -> None:
    num_ranks, costs = case
    optimum = float(np.sort(costs)[::-1][::num_ranks].sum())
    assert slowest_at_each_micro_step(costs[deal(costs, num_ranks)], num_ranks) == optimum


@given(COSTS)
def test_two_ranks_differ_by_less_than_two_rows_do(case: tuple[int, np.ndarray]) -> None:
    num_ranks, costs = case
    totals = costs[deal(costs, num_ranks)].reshape(num_ranks, -1).sum(axis=1)
    assert totals.max() - totals.min() <= costs.max() - costs.min()
    # The deal is not an optimum of the sums: lucky rows may become a little worse.
    mean = max(totals.mean(), 1e-9)
    worse = (costs.max() - costs.min()) / mean
    assert (
        imbalance(costs[deal(costs, num_ranks)], num_ranks) <= imbalance(costs, num_ranks) + worse
    )


def test_rows_of_equal_cost_keep_their_order() -> None:
    assert deal(np.ones(6, np.int64), 2).tolist() == [0, 2, 4, 1, 3, 5]
    assert deal(np.ones(4, np.int64), 1).tolist() == [0, 1, 2, 3]


def test_neighbouring_ranks_deal_among_themselves() -> None:
    costs = np.array([1, 9, 2, 8, 5, 5, 7, 3])
    assert costs[deal(costs, 4, among=2)].reshape(4, 2).tolist() == [[9, 1], [8, 2], [7, 3], [5, 5]]
    assert deal(costs, 4, among=1).tolist() == [1, 0, 3, 2, 4, 5, 6, 7]


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="7 rows do not divide by 2 ranks"):
        deal(np.ones(7, np.int64), 2)
    with pytest.raises(ConfigError, match="4 ranks, among 3 at a time"):
        deal(np.ones(8, np.int64), 4, among=3)


def test_rows_without_cost_are_balanced() -> None:
    assert imbalance(np.zeros(4, np.int64), 2) == 1.0

"""The page of recipes: what it says of the usual snippets is so."""

import random

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
)
from torch.utils.data._utils.pin_memory import pin_memory

from tests.helpers.doc_pages import blocks_of
from tests.helpers.paths import DOCS


def test_every_recipe_has_a_snippet_that_runs():
    recipes = (DOCS / "recipes.md").read_text().split("\n## ")[1:]
    assert len(recipes) == 9
    for recipe in recipes:
        assert any(not block.not_run for block in blocks_of(recipe)), recipe.partition("\n")[0]


class _Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        yield from self.items


class _Rows(Dataset):
    def __init__(self, items, load=lambda item: item):
        self.items, self.load = items, load

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.load(self.items[i])


def test_each_worker_runs_a_whole_iterable_dataset():
    loader = DataLoader(_Stream(range(6)), batch_size=None, num_workers=2)
    assert sorted(loader) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_an_iterable_dataset_with_a_distributed_sampler_raises():
    stream = _Stream(range(8))
    with pytest.raises(TypeError, match="has no len"):
        DistributedSampler(stream, num_replicas=2, rank=0)
    sampler = DistributedSampler(_Rows(range(8)), num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="IterableDataset: expected unspecified sampler"):
        DataLoader(stream, sampler=sampler)


def test_without_set_epoch_all_epochs_have_one_order():
    sampler = DistributedSampler(_Rows(range(100)), num_replicas=2, rank=0)
    assert list(sampler) == list(sampler)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first


@pytest.mark.parametrize(
    ("drop_last", "num_seen", "num_different"), [(False, 12, 10), (True, 8, 8)]
)
def test_a_distributed_sampler_repeats_or_leaves_out(drop_last, num_seen, num_different):
    samplers = [
        DistributedSampler(_Rows(range(10)), num_replicas=4, rank=rank, drop_last=drop_last)
        for rank in range(4)
    ]
    seen = [i for sampler in samplers for i in sampler]
    assert (len(seen), len(set(seen))) == (num_seen, num_different)


def test_a_distributed_samplers_global_batches_depend_on_the_ranks():
    def batches(num_ranks):
        samplers = [
            DistributedSampler(_Rows(range(100)), num_replicas=num_ranks, rank=rank)
            for rank in range(num_ranks)
        ]
        shares = [list(sampler) for sampler in samplers]
        size = 24 // num_ranks
        starts = range(0, len(shares[0]), size)
        return [sorted(i for share in shares for i in share[at : at + size]) for at in starts]

    assert batches(3)[-1] != batches(2)[-1]  # repeats fill up the epoch's end
    assert len(batches(8)[-1]) != len(batches(2)[-1])


def test_skipping_batches_loads_them_all():
    loaded = []
    loader = DataLoader(_Rows(range(40), load=lambda i: loaded.append(i) or i), batch_size=4)
    for i, _ in enumerate(loader):
        if i < 5:
            continue
        break
    assert len(loaded) == 24


class _Drawn(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return random.random()


def test_draws_from_global_randomness_depend_on_the_number_of_workers():
    def drawn(num_workers):
        torch.manual_seed(0)
        return torch.cat(list(DataLoader(_Drawn(), batch_size=2, num_workers=num_workers))).tolist()

    one, two = drawn(1), drawn(2)
    assert one == drawn(1)
    assert one != two


def test_clipping_before_unscale_clips_to_almost_nothing():
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    assert scaler.get_scale() == 65536
    scaler.scale((weight * 0.1).sum()).backward()  # a gradient of norm 0.2: nothing to clip
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    scaler.step(optimizer)
    assert float((1 - weight.detach()).norm()) == pytest.approx(1 / 65536, rel=1e-2)


class _OwnBatch:
    def __init__(self):
        self.images = torch.zeros(2)


def test_a_batch_of_ones_own_class_is_not_pinned():
    batch = _OwnBatch()
    assert pin_memory(batch) is batch
    batch.pin_memory = lambda: "pinned"
    assert pin_memory(batch) == "pinned"

"""What docs/frameworks.md says of torchdata, accelerate and torch's checkpoints is so.

One process and no kill here (see test_framework_ranks.py), but the ends of epochs, and the traps.
"""

import json
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

import mmstream as mm
from mmstream.families.family import import_torchvision
from tests.helpers.frameworks import NUM_STEPS, TextModel, keys_of, plan, text_pipeline

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks warn of their own affairs


@pytest.fixture
def pipeline(corpus):
    return text_pipeline(corpus)


# ---- a DataLoader around the loader, torchdata's or torch's


def stateful(*args, **settings):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(*args, batch_size=None, **settings)


@pytest.mark.parametrize("stop", [0, 1, NUM_STEPS - 1, NUM_STEPS, NUM_STEPS + 2])
def test_a_stateful_data_loader_resumes_at_every_step_also_on_another_world(pipeline, stop):
    batches, seen = stateful(mm.Loader(pipeline), num_workers=0), []
    while len(seen) < stop:
        seen += keys_of(islice(batches, stop - len(seen)))
    state = json.loads(json.dumps(batches.state_dict()))
    columns = []
    for rank in range(2):
        other = stateful(mm.Loader(pipeline, world=mm.World(rank, 2)), num_workers=0)
        other.load_state_dict(state)
        rest = keys_of(other) + keys_of(other)
        columns.append(rest[: 2 * NUM_STEPS - stop])
    rest = [a + b for a, b in zip(*columns, strict=True)]
    expected = plan(pipeline, 2)
    assert seen + rest == expected[: len(seen + rest)]
    assert len(seen + rest) >= min(2 * NUM_STEPS, stop + NUM_STEPS)


def test_a_data_loader_that_makes_batches_of_batches_is_refused(pipeline):
    with pytest.raises(mm.ConfigError, match=r"batch_size=None, .*train\.LoaderTrainer"):
        next(iter(DataLoader(mm.Loader(pipeline), batch_size=8)))


def test_a_data_loader_with_workers_around_a_loader_is_refused_not_repeated(pipeline):
    with pytest.raises(mm.ConfigError, match="worker processes of its own"):
        next(iter(DataLoader(mm.Loader(pipeline), batch_size=None, num_workers=1)))


# ---- accelerate


def sizes(samples):
    return {"size": torch.tensor([len(sample["input_ids"]) for sample in samples])}


@pytest.mark.slow
def test_accelerate_leaves_a_loader_as_it_is_and_looks_ahead_in_a_data_loader(pipeline):
    from accelerate import Accelerator

    accelerator, loader = Accelerator(cpu=True), mm.Loader(pipeline)
    assert accelerator.prepare(loader) is loader
    for _ in loader:
        break
    assert loader.state_dict()["step"] == 1

    inner = mm.Loader(replace(pipeline, collate=sizes))
    for _ in accelerator.prepare(DataLoader(inner, batch_size=None)):
        break
    assert inner.state_dict()["step"] == 2  # a batch that nobody was given has been counted


def test_accelerate_tries_to_shard_a_data_loader_and_fails(pipeline):
    from accelerate.data_loader import prepare_data_loader

    sharded = prepare_data_loader(
        DataLoader(mm.Loader(pipeline), batch_size=None),
        num_processes=2, process_index=0, dispatch_batches=False, put_on_device=False,
    )  # fmt: skip
    with pytest.raises((TypeError, mm.ConfigError), match="NoneType"):
        next(iter(sharded))


@pytest.mark.parametrize("stop", [1, NUM_STEPS, NUM_STEPS + 1])
def test_accelerate_saves_a_registered_loader_after_the_last_delivered_batch(
    pipeline, tmp_path, stop
):
    from accelerate import Accelerator

    accelerator, loader, seen = Accelerator(cpu=True), mm.Loader(pipeline), []
    accelerator.register_for_checkpointing(loader)
    while len(seen) < stop:
        seen += keys_of(islice(mm.to_device(loader, accelerator.device), stop - len(seen)))
    accelerator.save_state(tmp_path)
    again, rest = Accelerator(cpu=True), mm.Loader(pipeline)
    again.register_for_checkpointing(rest)
    again.load_state(tmp_path)
    assert seen + keys_of(rest) == plan(pipeline, 1 + stop // NUM_STEPS)


def test_accelerate_accumulates_across_the_end_of_an_epoch(pipeline):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = accelerator.prepare(TextModel())
    loader, stepped = mm.Loader(pipeline), []
    for _ in range(2):
        for _ in loader:
            with accelerator.accumulate(model):
                stepped.append(accelerator.sync_gradients)
    assert stepped == 3 * [False, False, False, True]


# ---- torch.distributed.checkpoint


@pytest.mark.parametrize("stop", [0, 3, NUM_STEPS])
def test_dcp_takes_a_loader_as_a_stateful(pipeline, tmp_path, stop):
    import torch.distributed.checkpoint as dcp

    loader = mm.Loader(pipeline)
    seen = keys_of(islice(loader, stop))
    dcp.save({"loader": loader}, checkpoint_id=tmp_path)
    other = mm.Loader(pipeline)
    dcp.load({"loader": other}, checkpoint_id=tmp_path)
    assert other.state_dict() == loader.state_dict()
    assert seen + keys_of(other) == plan(pipeline, 1 + stop // NUM_STEPS)


# ---- all


@pytest.mark.slow
def test_what_moves_batches_leaves_their_lineage(pipeline):
    import_torchvision()
    from accelerate.utils import send_to_device
    from lightning.fabric.utilities import move_data_to_device

    batch = next(iter(mm.Loader(pipeline)))
    for move in (move_data_to_device, send_to_device):
        moved = move(batch, torch.device("cpu"))
        assert moved["__lineage__"] is batch["__lineage__"]
        assert moved["__key__"] == batch["__key__"]

"""Lightning ends loops early and begins them again: no sample is lost or shown again by that."""

import importlib
import logging
from dataclasses import dataclass, field, replace

import pytest
import torch

import mmstream as mm
from mmstream.families.family import import_torchvision
from tests.helpers.frameworks import NUM_STEPS, text_pipeline

pytestmark = [
    pytest.mark.slow,  # the import of Lightning alone takes seconds
    pytest.mark.filterwarnings("ignore"),  # Lightning warns of its own affairs
]


class StopError(Exception):
    """Ends a run as a kill does."""


@dataclass
class Run:
    """What a run of Lightning showed to the model."""

    trained: list[list[str]] = field(default_factory=list)
    validated: list[list[str]] = field(default_factory=list)


def fit(
    corpus,
    folder,
    *,
    epochs=3,
    resume=None,
    validate=None,
    stop=None,
    on_device=False,
    second=None,
    validates=True,
    **settings,
) -> Run:
    """Train on a shuffled loader and validate on one that is not; die after `stop` steps.

    `validate` is a checkpoint to validate before. `second` is the mode of a CombinedLoader, which
    has a loader with half as many steps too.
    """
    import_torchvision()
    lightning = importlib.import_module("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    from mmstream.train import LightningLoaderState

    run = Run()

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, _):
            batches = [batch] if second is None else [part for part in batch if part]
            run.trained.append([key for part in batches for key in part["__key__"]])
            return self.layer(torch.ones(1)).sum()

        def on_train_batch_end(self, *_):
            if len(run.trained) == stop:
                self.trainer.save_checkpoint(folder / "stopped.ckpt")
                raise StopError

        def on_validation_epoch_start(self):
            if not self.trainer.sanity_checking:
                run.validated.append([])

        def validation_step(self, batch, _):
            if not self.trainer.sanity_checking:
                valid = zip(batch["__key__"], batch["__valid__"].tolist(), strict=True)
                run.validated[-1] += [key for key, is_valid in valid if is_valid]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_last=True)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[LightningLoaderState(), checkpoints], **settings,
    )  # fmt: skip
    loader = mm.Loader(text_pipeline(corpus))
    in_order = replace(text_pipeline(corpus), shuffle=False, drop_last=False)
    validation = mm.Loader(in_order)
    if on_device:
        loader = mm.to_device(loader, "cpu")
    model = Model()
    if validate:
        trainer.validate(model, validation, ckpt_path=validate, verbose=False)
    try:
        if second:
            other = mm.Loader(replace(text_pipeline(corpus), global_batch_size=32, seed=1))
            loader = lightning.pytorch.utilities.CombinedLoader([loader, other], second)
        trainer.fit(model, loader, validation if validates else None, ckpt_path=resume)
    except StopError:
        assert stop is not None
    return run


@pytest.mark.parametrize(
    ("settings", "num_validated"),
    [
        ({}, 97),
        ({"limit_train_batches": 4}, 97),
        ({"limit_val_batches": 2, "limit_train_batches": 4, "val_check_interval": 2}, 32),
    ],
)
def test_loops_that_end_early_begin_anew(corpus, tmp_path, settings, num_validated):
    run = fit(corpus, tmp_path, **settings)
    assert {len(keys) for keys in run.validated} == {num_validated}
    assert all(keys == run.validated[0] for keys in run.validated)
    num_steps = settings.get("limit_train_batches", NUM_STEPS)
    assert len(run.trained) == 3 * num_steps
    plan = mm.Loader(text_pipeline(corpus))
    for epoch in range(3):
        keys = [batch["__key__"] for batch in plan]
        assert run.trained[epoch * num_steps : (epoch + 1) * num_steps] == keys[:num_steps]


@pytest.mark.parametrize(("limit", "on_device"), [(None, False), (4, True)])
def test_a_resumed_run_equals_the_undisturbed_one(corpus, tmp_path, limit, on_device):
    """Killed mid-epoch, at an epoch's end and in the next one, or ended between two."""
    length = limit or NUM_STEPS
    stops = (1, length - 1, length, length + 2)
    require_exact_resumes(corpus, tmp_path, stops, limit_train_batches=limit, on_device=on_device)


@pytest.mark.parametrize(
    ("mode", "limit", "stops"), [("min_size", 3, (3, 5)), ("max_size_cycle", None, (5, 8))]
)
def test_two_loaders_are_resumed_too(corpus, tmp_path, mode, limit, stops):
    require_exact_resumes(corpus, tmp_path, stops, limit_train_batches=limit, second=mode)


def require_exact_resumes(corpus, tmp_path, stops, **settings):
    whole = fit(corpus, tmp_path / "whole", **settings).trained
    for stop in stops:
        folder = tmp_path / str(stop)
        run = fit(corpus, folder, stop=stop, **settings)
        rest = fit(corpus, folder, resume=folder / "stopped.ckpt", **settings)
        assert run.trained + rest.trained == whole, stop
    folder = tmp_path / "ended"
    run = fit(corpus, folder, epochs=1, **settings)
    rest = fit(corpus, folder, resume=folder / "last.ckpt", **settings)
    assert run.trained + rest.trained == whole


def test_a_validation_of_a_checkpoint_moves_no_later_training(corpus, tmp_path):
    begun = fit(corpus, tmp_path, epochs=1)
    again = fit(corpus, tmp_path, epochs=1, validate=tmp_path / "last.ckpt")
    assert again.trained == begun.trained


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("first", [NUM_STEPS, NUM_STEPS + 2])
def test_a_run_goes_on_after_max_steps(corpus, tmp_path, first, validates):
    """At an epoch's end, Lightning completes the epoch with one batch more, and begins the next."""
    whole = fit(corpus, tmp_path / "whole", epochs=-1, max_steps=15, validates=validates).trained
    run = fit(corpus, tmp_path, epochs=-1, max_steps=first, validates=validates)
    last = tmp_path / "last.ckpt"
    rest = fit(corpus, tmp_path, epochs=-1, max_steps=15, validates=validates, resume=last)
    assert run.trained + rest.trained == whole


def test_a_checkpoint_without_a_state_is_refused(corpus, tmp_path):
    fit(corpus, tmp_path, epochs=1)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    del saved["mmstream_loader"]
    torch.save(saved, tmp_path / "other.ckpt")
    with pytest.raises(mm.StateError, match="written without this callback"):
        fit(corpus, tmp_path, resume=tmp_path / "other.ckpt")

"""What docs/frameworks.md says of the two trainers is so: Hugging Face's, and Lightning's.

One process and no kill here (see test_frameworks_ranks.py).
"""

import importlib
import logging

import pytest
from shared import make_pipeline

import mmstream as mm
from tests.helpers.frameworks import NUM_STEPS, plan

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks warn of their own affairs


@pytest.fixture
def pipeline(corpus):
    return make_pipeline(corpus)


class StopError(Exception):
    """Ends a run from a callback."""


# ---- Trainer


def trainer(loader, out, seen, callback=None, **settings):
    example = importlib.import_module("with_transformers")

    class Noting(example.Model):
        def forward(self, batch):
            seen.append(batch["__key__"])
            return super().forward(batch)

    arguments = example.TrainingArguments(
        output_dir=str(out), num_train_epochs=2, use_cpu=True, report_to="none",
        disable_tqdm=True, **({"ignore_data_skip": True} | settings),
    )  # fmt: skip
    return example.StreamTrainer(
        Noting(), arguments, loader=loader, callbacks=[callback] if callback else None
    )


def stop_when_saved():
    from transformers import TrainerCallback

    class StopWhenSaved(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            raise StopError

    return StopWhenSaved()


@pytest.mark.parametrize(("stop", "on_device"), [(1, False), (5, True), (6, False), (9, True)])
def test_trainer_resumes_after_the_last_step_it_took(pipeline, tmp_path, stop, on_device):
    def made():
        loader = mm.Loader(pipeline)
        return mm.to_device(loader, "cpu") if on_device else loader

    seen = []
    with pytest.raises(StopError):
        trainer(made(), tmp_path, seen, stop_when_saved(), save_steps=stop).train()
    assert len(seen) == stop
    resumed = trainer(made(), tmp_path, seen, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    assert seen == plan(pipeline, 2)
    assert resumed.state.global_step == 2 * NUM_STEPS


def test_trainer_accumulates_exactly_where_that_divides_an_epoch(pipeline, tmp_path):
    seen = []
    with pytest.raises(StopError):
        trainer(
            mm.Loader(pipeline), tmp_path, seen, stop_when_saved(),
            save_steps=2, gradient_accumulation_steps=2,
        ).train()  # fmt: skip
    assert len(seen) == 4
    resumed = trainer(mm.Loader(pipeline), tmp_path, seen, gradient_accumulation_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert seen == plan(pipeline, 2)
    assert resumed.state.global_step == NUM_STEPS
    with pytest.raises(ValueError, match="must divide"):
        trainer(mm.Loader(pipeline), tmp_path, seen, gradient_accumulation_steps=4).train()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"ignore_data_skip": False}, AttributeError),
        ({"restore_callback_states_from_checkpoint": True}, TypeError),
    ],
)
def test_trainer_does_not_resume_quietly_with_the_wrong_settings(
    pipeline, tmp_path, settings, error
):
    with pytest.raises(StopError):
        trainer(mm.Loader(pipeline), tmp_path, [], stop_when_saved(), save_steps=3).train()
    resumed = trainer(mm.Loader(pipeline), tmp_path, [], **settings)
    with pytest.raises(error):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_trainer_would_lose_an_optimizer_step_where_it_does_not_divide(
    pipeline, tmp_path, monkeypatch
):
    example = importlib.import_module("with_transformers")
    monkeypatch.setattr(example.StreamTrainer, "get_train_dataloader", lambda self: self.loader)
    seen = []
    with pytest.raises(StopError):
        trainer(
            mm.Loader(pipeline), tmp_path, seen, stop_when_saved(),
            save_steps=1, gradient_accumulation_steps=4,
        ).train()  # fmt: skip
    resumed = trainer(mm.Loader(pipeline), tmp_path, seen, gradient_accumulation_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.state.global_step == 3  # 4 + 2 batches an epoch are 2 steps, two epochs 4


# ---- Lightning


def fit(loader, seen, resume=None, stop=None, **settings):
    example = importlib.import_module("with_lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Noting(example.Captions):
        def training_step(self, batch, batch_idx):
            seen.append(batch["__key__"])
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *args):
            if len(seen) == stop:
                self.trainer.save_checkpoint(settings["default_root_dir"] / "stopped.ckpt")
                raise StopError

    run = example.lightning.Trainer(
        max_epochs=2, use_distributed_sampler=False, accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        **settings,
    )  # fmt: skip
    run.fit(Noting(), loader, ckpt_path=resume)
    return run


@pytest.mark.parametrize(("stop", "on_device"), [(1, False), (5, True), (6, False), (9, True)])
def test_lightning_resumes_after_the_last_step_it_took(pipeline, tmp_path, stop, on_device):
    def made():
        loader = mm.Loader(pipeline)
        return mm.to_device(loader, "cpu") if on_device else loader

    seen = []
    with pytest.raises(StopError):
        fit(made(), seen, stop=stop, default_root_dir=tmp_path)
    assert len(seen) == stop
    run = fit(made(), seen, resume=tmp_path / "stopped.ckpt", default_root_dir=tmp_path)
    assert seen == plan(pipeline, 2)
    assert (run.global_step, run.current_epoch) == (2 * NUM_STEPS, 2)


class WithoutLength:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


def test_lightning_looks_ahead_at_what_has_no_length(pipeline, tmp_path):
    loaders = [mm.Loader(pipeline), mm.Loader(pipeline)]
    for loader, given in zip(loaders, [loaders[0], WithoutLength(loaders[1])], strict=True):
        with pytest.raises(StopError):
            fit(given, [], stop=3, default_root_dir=tmp_path)
        assert loader.state_dict()["step"] == (3 if given is loader else 4)

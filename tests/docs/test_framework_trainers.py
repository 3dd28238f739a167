"""What docs/frameworks.md says of Hugging Face's Trainer is so. Lightning: test_lightning.py.

One process and no kill here (see test_framework_ranks.py).
"""

import pytest

import mmstream as mm
from tests.helpers.frameworks import NUM_STEPS, TextModel, plan, text_pipeline

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks warn of their own affairs


@pytest.fixture
def pipeline(corpus):
    return text_pipeline(corpus)


class StopError(Exception):
    """Ends a run from a callback."""


def trainer(loader, out, seen=None, callback=None, **settings):
    """A LoaderTrainer on a model that takes whole batches and notes their keys."""
    from transformers import TrainingArguments

    from mmstream.train import LoaderTrainer

    class Noting(TextModel):
        evaluated = []  # noqa: RUF012

        def forward(self, batch):
            notes = self.evaluated if not self.training else [] if seen is None else seen
            notes.append(batch["__key__"])
            return {"loss": super().forward(batch)}

    others = {name: settings.pop(name) for name in ("eval_dataset",) if name in settings}
    arguments = TrainingArguments(
        output_dir=str(out), num_train_epochs=2, use_cpu=True, report_to="none",
        disable_tqdm=True, logging_steps=1, **settings,
    )  # fmt: skip
    return LoaderTrainer(
        Noting(), arguments, train_dataset=loader, data_collator=lambda batch: {"batch": batch},
        callbacks=[callback] if callback else None, **others,
    )  # fmt: skip


def stop_when_saved():
    from transformers import TrainerCallback

    class StopWhenSaved(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            raise StopError

    return StopWhenSaved()


def killed(pipeline, out, seen=None, **settings):
    """Train until the first checkpoint is written, and leave."""
    with pytest.raises(StopError):
        trainer(mm.Loader(pipeline), out, seen, stop_when_saved(), **settings).train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "settings"),
    [
        (1, {}),
        (5, {"ignore_data_skip": True}),
        (6, {"restore_callback_states_from_checkpoint": True}),
        (9, {}),
    ],
)
def test_trainer_resumes_after_the_last_step_it_took(pipeline, tmp_path, stop, settings):
    seen = []
    killed(pipeline, tmp_path, seen, save_steps=stop)
    assert len(seen) == stop
    given = mm.to_device(mm.Loader(pipeline), "cpu") if stop == 9 else mm.Loader(pipeline)
    resumed = trainer(given, tmp_path, seen, save_strategy="no", **settings)
    resumed.train(resume_from_checkpoint="auto")
    assert seen == plan(pipeline, 2)
    assert resumed.state.global_step == 2 * NUM_STEPS
    if "ignore_data_skip" in settings:
        return  # then the Trainer counts the epoch from where it resumes
    logged = [line["epoch"] for line in resumed.state.log_history if "loss" in line]
    expected = [step / NUM_STEPS for step in range(1, 2 * NUM_STEPS + 1)]
    assert logged == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_trainer_logs_the_samples_of_all_ranks(pipeline, tmp_path):
    first = trainer(mm.Loader(pipeline), tmp_path, save_steps=5)
    metrics = first.train().metrics
    seconds = metrics["train_runtime"]
    assert metrics["train_samples_per_second"] * seconds == pytest.approx(12 * 16, rel=0.01)
    assert first.num_examples(first.get_train_dataloader()) == 6 * 16
    assert first.get_total_train_batch_size(first.args) == 16
    rest = trainer(mm.Loader(pipeline), tmp_path, save_strategy="no")
    metrics = rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5")).metrics
    seconds = metrics["train_runtime"]
    assert metrics["train_samples_per_second"] * seconds == pytest.approx(7 * 16, rel=0.01)


@pytest.mark.slow
def test_trainer_accumulates_and_resumes_exactly(pipeline, tmp_path):
    """4 does not divide the 6 steps of an epoch: its last optimizer step takes two batches."""
    settings = {"gradient_accumulation_steps": 4}
    seen = []
    killed(pipeline, tmp_path, seen, save_steps=1, **settings)
    assert len(seen) == 4
    resumed = trainer(mm.Loader(pipeline), tmp_path, seen, save_strategy="no", **settings)
    resumed.train(resume_from_checkpoint="auto")
    assert seen == plan(pipeline, 2)
    assert resumed.state.global_step == 2 * 2


@pytest.mark.slow
def test_trainer_says_what_does_not_fit(pipeline, tmp_path):
    from transformers import Trainer, TrainingArguments

    killed(pipeline, tmp_path, save_steps=2)
    other = trainer(mm.Loader(pipeline), tmp_path, gradient_accumulation_steps=2)
    with pytest.raises(mm.StateError, match="Trainer goes on at epoch 0 step 4, the loader at"):
        other.train(resume_from_checkpoint="auto")
    with pytest.raises(mm.ConfigError, match="train_dataset is a list"):
        trainer([1, 2], tmp_path)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    plain = Trainer(TextModel(), arguments, train_dataset=mm.Loader(pipeline))
    with pytest.raises(mm.ConfigError, match=r"train\.LoaderTrainer"):
        plain.train()


def test_trainer_evaluates_on_the_first_epoch_of_a_loader_each_time(pipeline, tmp_path):
    run = trainer(
        mm.Loader(pipeline), tmp_path, eval_dataset=mm.Loader(pipeline), save_strategy="no"
    )
    metrics = run.evaluate()
    assert run.evaluate().keys() == metrics.keys()
    assert run.model.evaluated == 2 * plan(pipeline, 1)
    seconds = metrics["eval_runtime"]
    assert metrics["eval_samples_per_second"] * seconds == pytest.approx(96, rel=0.01)

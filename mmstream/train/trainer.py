"""The Trainer of `transformers` on a loader: no sampler, exact resumes, true counts in its logs.

    loader -> device -> `model_inputs` -> Trainer

The Trainer resumes mid-epoch by skipping as many batches as it has trained on. Here those are
placeholders, which cost nothing, and the loader goes on where its state stands. So the Trainer's
own count of steps and epochs stays right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from mmstream.batching.valid import summed_loss, target_weights
from mmstream.errors import ConfigError, StateError
from mmstream.families.family import import_torchvision
from mmstream.loader.device import DeviceLoader, Normalize, to_device
from mmstream.loader.loader import Loader
from mmstream.settings import checked
from mmstream.state import state_at
from mmstream.train.inputs import model_inputs, preference_inputs
from mmstream.types import IGNORED_LABEL, Batch

import_torchvision()  # before transformers does, where it does not load by itself

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

LABEL_WEIGHTS = "label_weights"

_DATASETS = ("train_dataset", "eval_dataset")

_OF_PIPELINE = (
    *("packing", "eval_packing", "padding_free", "assistant_only_loss", "completion_only_loss"),
    *("chat_template_path", "precompute_ref_log_probs"),
)
"""Settings of TRL's trainers for what a pipeline has done already."""


class LoaderState(TrainerCallback, ExportableState):  # type: ignore[misc]  # Any, for mypy
    """Keeps the loader's state in ``trainer_state.json``, and applies it on a resume.

    `LoaderTrainer` adds one by itself.
    """

    def __init__(self) -> None:
        self.saved: dict[str, Any] | None = None
        self._batches: _Batches | None = None

    def state(self) -> dict[str, Any]:
        """Return what the Trainer saves: the loader's state after the last batch it has taken."""
        saved = self.saved if self._batches is None else self._batches.loader.state_dict()
        return {"args": {}, "attributes": {"saved": saved}}

    def on_train_begin(
        self, args: Any, state: Any, _control: Any, train_dataloader: Any = None, **_others: Any
    ) -> None:
        """Bring the loader to the step of the checkpoint, if the run was resumed.

        Raises:
            StateError: The checkpoint has no state of a loader, or the Trainer stands at another
                step of the epoch than the loader.
        """
        batches = train_dataloader.dataset
        self._batches = batches
        if not state.global_step:
            return
        stored = state.stateful_callbacks.get(type(self).__name__)
        saved = stored and stored["attributes"]["saved"]
        if not saved:
            raise StateError(
                "LoaderTrainer: the checkpoint has no state of a loader; it was saved by another "
                "Trainer"
            )
        batches.loader.load_state_dict(saved)
        batches.skip(state.global_step, args.gradient_accumulation_steps, args.ignore_data_skip)


_Trainer: Any = object
"""The base of the mixin for type checkers: any Trainer, with all its methods."""


class LoaderTrainerMixin(_Trainer):  # type: ignore[misc]  # Any, for mypy
    """Lets a Trainer of `transformers`, or one derived from it, train on an `mm.Loader`.

    ``class MyTrainer(LoaderTrainerMixin, SFTTrainer): pass`` is all that is needed. `LoaderTrainer`
    is the mixin on the plain Trainer. TRL's SFTTrainer, DPOTrainer and RewardTrainer are tested.

    - ``train_dataset`` is an `mm.Loader`, or what `mm.to_device` returns. A loader's batches are
      moved to the Trainer's device, one ahead. With ``processing_class=processor`` they are also
      normalised there.
    - `data_collator` is a function from such a batch to the arguments of the model. None: what
      `model_inputs` returns, or `preference_inputs` for the two trainers of TRL that compare.
    - The loader decides on the rows of a rank and on its workers. So the Trainer's
      ``per_device_train_batch_size``, samplers and ``dataloader_*`` settings are not used.
    - A checkpoint holds the loader's state. A resume goes on at the exact step, also on another
      number of ranks. ``train(resume_from_checkpoint="auto")`` takes the newest complete
      checkpoint of ``output_dir``, or starts over where there is none.
    - With ``Pipeline(batching=)``, the loss of an optimizer step is the mean over all its labels,
      of all ranks and accumulated batches. Some models, such as Qwen-VL, take no number of labels:
      their loss is then computed here, from their logits. So is that of batches with
      ``label_weights``, as the mean over the weights.
    - Samples per second, epochs and the total batch size in the logs are those of the loader.
    - ``eval_dataset`` may be a loader too. Each evaluation reads its first epoch.

    Args:
        args: What the Trainer takes.
        data_collator: As above. Give it by its name, and so ``train_dataset`` and ``eval_dataset``.
        kwargs: What the Trainer takes.

    Raises:
        ConfigError: ``train_dataset`` is not a loader. Or a trainer of TRL lacks a `data_collator`,
            or has settings for preparing data, such as ``packing``.
    """

    compute_loss_func: Any
    model_accepts_loss_kwargs: bool

    @checked()
    def __init__(
        self,
        *args: Any,
        data_collator: Callable[[Batch], dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        train_dataset = kwargs.get("train_dataset")
        if train_dataset is not None and not _is_loader(train_dataset):
            raise ConfigError(
                f"LoaderTrainer: train_dataset is a {type(train_dataset).__name__}: give an "
                "mm.Loader, or what mm.to_device returns"
            )
        self._stand_in: Any = None
        loaders = {}
        is_of_trl = any(base.__module__.partition(".")[0] == "trl" for base in type(self).__mro__)
        if is_of_trl:  # it prepares datasets of Hugging Face, and takes nothing else
            self._check_settings_of_trl(data_collator, *args, *kwargs.values())
            self._stand_in = import_module("datasets").Dataset.from_dict({"input_ids": [[0]]})
            loaders = {name: kwargs[name] for name in _DATASETS if _has_loader(kwargs.get(name))}
            kwargs |= dict.fromkeys(loaders, self._stand_in)
        super().__init__(*args, **kwargs)
        for name, loader in loaders.items():
            setattr(self, name, loader)
        self.data_collator = data_collator or self._model_inputs
        loader = self.train_dataset
        is_flat = _is_loader(loader) and _pipeline_of(loader).flat is not None
        has_own_loss = self.compute_loss_func or getattr(self.args, "loss_type", "nll") != "nll"
        self._takes_weights = is_flat and data_collator is None and not has_own_loss
        if self._takes_weights and not self.model_accepts_loss_kwargs:
            if is_of_trl:  # SFTTrainer divides by the number of labels itself, if it is counted
                self.model_accepts_loss_kwargs = True
            else:
                self.compute_loss_func = token_loss
        self.add_callback(LoaderState())

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does. "auto" resumes from the newest complete checkpoint, if any."""
        if resume_from_checkpoint == "auto":
            resume_from_checkpoint = _newest_checkpoint(self.args.output_dir)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return the loader in the form that the Trainer iterates over."""
        return self._as_dataloader(self.train_dataset, restarts=False)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader in that form, or what the Trainer makes of another data set."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        loader = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        if not _is_loader(loader):
            return super().get_eval_dataloader(eval_dataset)
        return self._as_dataloader(loader, restarts=True)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of an optimizer step, over all ranks."""
        pipeline = _pipeline_of(self.train_dataset)
        return int(pipeline.global_batch_size * args.gradient_accumulation_steps)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of a step, and its labels or their weights over all ranks."""
        batches, count = super().get_batch_samples(*args, **kwargs)
        if not self._takes_weights or count is None:
            return batches, count
        total = torch.stack([_weight_of(inputs) for inputs in batches]).sum().to(self.args.device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            total = self.accelerator.gather(total).sum()
        return batches, total

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss as the Trainer does; where labels have weights, the mean over these."""
        if LABEL_WEIGHTS not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        weights, labels = inputs.pop(LABEL_WEIGHTS), inputs.pop("labels")
        if not model.training:  # the Trainer counts the labels of evaluations, not their weights
            num_items_in_batch = None
        outputs = model(**inputs)
        loss = token_loss(outputs, labels, num_items_in_batch, weights)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over ranks
        return (loss, outputs) if return_outputs else loss

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Leave a loader as it is, where TRL would tokenize a data set."""
        if dataset is self._stand_in or _has_loader(dataset):
            return dataset
        return super()._prepare_dataset(dataset, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights, also where transformers saved them under names of older versions.

        It does so for Qwen2-VL and others. Its own resume then leaves them out, with a warning
        (huggingface/transformers, issue 43701).
        """
        self._misses_weights = False
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._misses_weights:
            trained = self.model
            loaded, report = type(trained).from_pretrained(
                resume_from_checkpoint, dtype=trained.dtype, output_loading_info=True
            )
            if report["missing_keys"]:
                raise StateError(
                    f"LoaderTrainer: {resume_from_checkpoint} has no weights for "
                    f"{min(report['missing_keys'])}: it was saved by another model"
                )
            trained.load_state_dict(loaded.state_dict())

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn as the Trainer does, unless the weights are loaded by their other names."""
        has_others = bool(load_result.missing_keys and load_result.unexpected_keys)
        self._misses_weights = has_others and hasattr(self.model, "from_pretrained")
        if not self._misses_weights:
            super()._issue_warnings_after_load(load_result)

    def _check_settings_of_trl(self, data_collator: Any, *values: Any) -> None:
        """Refuse what a trainer of TRL would do with its own data, or cannot do with a batch."""
        arguments = next((value for value in values if isinstance(value, TrainingArguments)), None)
        for name in _OF_PIPELINE:
            if getattr(arguments, name, None):
                raise ConfigError(
                    f"{type(arguments).__name__}({name}={getattr(arguments, name)!r}): a loader's "
                    "pipeline decides that (Pipeline(batching=), TextDecoder); leave it out"
                )
        if data_collator is None and not self._is_a("SFTTrainer", "DPOTrainer", "RewardTrainer"):
            raise ConfigError(
                f"{type(self).__name__}: pass data_collator=, a function from a batch to what this "
                "trainer of TRL takes"
            )

    def _is_a(self, *names: str) -> bool:
        """Tell whether this Trainer is derived from one of that name."""
        return any(base.__name__ in names for base in type(self).__mro__)

    def _as_dataloader(self, loader: Any, *, restarts: bool) -> Any:
        if isinstance(loader, Loader):
            processor = getattr(self.processing_class, "image_processor", None)
            processor = processor or self.processing_class
            normalize = None
            if hasattr(processor, "image_mean") and hasattr(processor, "image_std"):
                normalize = Normalize(processor.image_mean, processor.image_std)
            loader = to_device(loader, self.args.device, normalize=normalize)
        batches = _Batches(loader, self.data_collator, restarts=restarts)
        return _Steps(batches, batch_size=None, num_workers=0, collate_fn=lambda inputs: inputs)

    def _model_inputs(self, batch: Batch) -> dict[str, Any]:
        if self._is_a("DPOTrainer", "RewardTrainer"):
            tokenizer: Any = getattr(self.processing_class, "tokenizer", self.processing_class)
            pairs = preference_inputs(batch, tokenizer.pad_token_id)
            if self._is_a("RewardTrainer"):
                del pairs["completion_mask"]
            return pairs
        inputs = model_inputs(batch, self.model)
        if LABEL_WEIGHTS not in batch:
            return inputs
        if not self._takes_weights:
            raise ConfigError(
                "LoaderTrainer: the batch has label_weights, which a loss inside of the model, "
                "compute_loss_func= and loss_type= do not know: pass Pipeline(batching=mm.Flat()) "
                "or mm.Pack and none of these, or a data_collator= that passes them on and a "
                "compute_loss that uses them"
            )
        return {**inputs, LABEL_WEIGHTS: target_weights(batch)}


class LoaderTrainer(LoaderTrainerMixin, Trainer):  # type: ignore[misc]  # Any, for mypy
    """The Trainer of `transformers` on an `mm.Loader`; `LoaderTrainerMixin` says what differs.

    Examples:
        ::

            trainer = LoaderTrainer(model, arguments, train_dataset=loader,
                                    processing_class=processor)
            trainer.train(resume_from_checkpoint="auto")
    """


class _Batches(IterableDataset[Any]):
    """A loader's batches as inputs of the model, with placeholders for those that are skipped.

    Args:
        loader: A `DeviceLoader`, or what has its methods.
        prepare: From a batch to the inputs.
        restarts: Whether each iteration is the loader's first epoch.
    """

    def __init__(
        self, loader: Any, prepare: Callable[[Batch], dict[str, Any]], *, restarts: bool
    ) -> None:
        self.loader = loader
        self._prepare = prepare
        self._restarts = restarts
        self._num_skipped = 0

    def __len__(self) -> int:
        """Samples of an epoch over all ranks, without those that only fill the last step."""
        pipeline = _pipeline_of(self.loader)
        num_slots = len(self.loader) * pipeline.global_batch_size
        return int(
            num_slots
            if pipeline.drop_last
            else min(num_slots, len(pipeline.dataset) * pipeline.repeat)
        )

    def __iter__(self) -> Iterator[dict[str, Any] | None]:
        if self._restarts:
            self.loader.load_state_dict(state_at(self.loader.state_dict(), 0, 0))
        num_skipped, self._num_skipped = self._num_skipped, 0
        yield from [None] * num_skipped
        for batch in self.loader:
            yield self._prepare(batch)

    def skip(self, num_steps: int, accumulation: int, ignores: bool) -> None:
        """Give placeholders for the batches that the Trainer will skip in the next iteration.

        Args:
            num_steps: Optimizer steps of the run so far.
            accumulation: Batches of an optimizer step. The last step of an epoch may have fewer.
            ignores: Whether the Trainer skips nothing (``ignore_data_skip``).

        Raises:
            StateError: The Trainer stands at another step than the loader.
        """
        state = self.loader.state_dict()
        epoch, step = divmod(num_steps, -(-len(self.loader) // accumulation))
        if (epoch, step * accumulation) != (state["epoch"], state["step"]):
            raise StateError(
                f"LoaderTrainer: the Trainer goes on at epoch {epoch} step {step * accumulation}, "
                f"the loader at epoch {state['epoch']} step {state['step']}: keep "
                "gradient_accumulation_steps and the loader's settings until the epoch ends"
            )
        self._num_skipped = 0 if ignores else state["step"]


class _Steps(DataLoader[Any]):
    """What a Trainer iterates over: as long as the loader has steps, on a data set of samples."""

    dataset: _Batches

    def __len__(self) -> int:
        return len(self.dataset.loader)


def token_loss(
    outputs: Any,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the cross entropy of the next tokens, as a mean over the labels of a whole step.

    Args:
        outputs: Of the model, with ``logits``, [B, T, V].
        labels: int64 [B, T], unshifted, -100 where there is none.
        num_items_in_batch: Labels of the step, or the sum of their weights, over all ranks and
            accumulated batches. None: those of this batch.
        weights: float32 [N], of the N targets that are not -100, in their order. None: all are 1.
    """
    targets = labels[:, 1:]
    total = summed_loss(outputs.logits[:, :-1], targets, weights)
    count = num_items_in_batch
    if count is None:
        count = (targets != IGNORED_LABEL).sum() if weights is None else weights.sum()
    count = torch.as_tensor(count, device=total.device)
    return total / torch.where(count > 0, count, 1)  # a step without a label is not NaN


def _weight_of(inputs: dict[str, Any]) -> Tensor:
    """Return the sum of the weights of the targets of a batch, float32; without any, each is 1."""
    weights: Tensor | None = inputs.get(LABEL_WEIGHTS)
    if weights is None:
        weights = inputs["labels"][:, 1:] != IGNORED_LABEL
    return weights.sum().float()


def _is_loader(value: Any) -> bool:
    return isinstance(value, Loader | DeviceLoader)


def _has_loader(value: Any) -> bool:
    """Tell whether a value is a loader, or a dict of loaders, as ``eval_dataset`` may be."""
    return any(map(_is_loader, value.values() if isinstance(value, dict) else [value]))


def _pipeline_of(loader: Any) -> Any:
    return getattr(loader, "loader", loader).pipeline


def _newest_checkpoint(folder: str) -> str | None:
    """Return the newest checkpoint with a ``trainer_state.json``, which is written last."""
    numbers = [
        int(number)
        for file in Path(folder).glob("checkpoint-*/trainer_state.json")
        if (number := file.parent.name.removeprefix("checkpoint-")).isdigit()
    ]
    return str(Path(folder, f"checkpoint-{max(numbers)}")) if numbers else None

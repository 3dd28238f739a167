"""The state of a loader in the checkpoints of Lightning, also in those of an epoch's end.

    loader or device -> Lightning's Trainer, with `LightningLoaderState`

Lightning saves and loads the state of a loader by itself, but it applies only a state of mid-epoch.
After a checkpoint that was written at an epoch's end it would show the same epoch again.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback
from torch.utils._pytree import tree_leaves

from mmstream.errors import ConfigError, StateError
from mmstream.loader.loader import Loader

KEY = "mmstream_loader"


class LightningLoaderState(Callback):
    """Keeps the loader's state in every checkpoint, and applies it when a fit is resumed.

    After an epoch that Lightning ended early (``limit_train_batches``), the state is the begin of
    the next one. Pass one to the Trainer that trains on an `mm.Loader`, on `mm.to_device`, or on a
    CombinedLoader of several.

    Raises:
        StateError: the checkpoint was written without this callback, or with other loaders.
        ConfigError: the run trains on no loader.

    Examples:
        ::

            trainer = lightning.Trainer(callbacks=[LightningLoaderState()])
            trainer.fit(model, loader, ckpt_path="last.ckpt")
    """

    def __init__(self) -> None:
        self._saved: list[dict[str, Any]] | None = None

    def on_save_checkpoint(self, trainer: Any, _pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the state beside the weights."""
        if trainer.train_dataloader is None:  # a checkpoint of a validation alone
            return
        ends_epoch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        checkpoint[KEY] = [
            loader.next_epoch_state() if ends_epoch else loader.state_dict()
            for loader in _loaders_of(trainer)
        ]

    def on_load_checkpoint(self, trainer: Any, _pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Note the state; the loader is not there yet."""
        if trainer.state.fn != "fit":  # a validation of a checkpoint moves no training
            return
        self._saved = checkpoint.get(KEY)
        if self._saved is None:
            raise StateError(
                "LightningLoaderState: the checkpoint has no state of a loader; it was written "
                "without this callback"
            )

    def on_train_start(self, trainer: Any, _pl_module: Any) -> None:
        """Bring the loader to the step of the checkpoint."""
        loaders = _loaders_of(trainer)
        if self._saved is None:
            return
        if len(loaders) != len(self._saved):
            raise StateError(
                f"LightningLoaderState: the checkpoint has the states of {len(self._saved)} "
                f"loaders, this run has {len(loaders)}"
            )
        for loader, state in zip(loaders, self._saved, strict=True):
            loader.load_state_dict(state)
        self._saved = None

    def on_train_epoch_end(self, trainer: Any, _pl_module: Any) -> None:
        """Go on after the one batch that Lightning trains on to complete an epoch.

        It does so after a resume where ``max_steps`` had ended the run at an epoch's end.
        """
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready > trainer.num_training_batches:
            for loader in _loaders_of(trainer):
                loader.load_state_dict(loader.state_dict())


def _loaders_of(trainer: Any) -> list[Loader]:
    """Return the loaders that a run trains on: one, or those of a CombinedLoader in their order."""
    loaders = []
    for batches in tree_leaves(trainer.train_dataloader):
        inner = batches
        while inner is not None and not isinstance(inner, Loader):
            inner = getattr(inner, "loader", None) or getattr(inner, "dataset", None)
        if inner is not None:
            loaders.append(inner)
    if not loaders:
        raise ConfigError(
            "LightningLoaderState: the run trains on no mm.Loader; leave this callback out"
        )
    return loaders

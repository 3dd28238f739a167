"""Loaders with the real one's protocol and made-up pixels, for the stages behind them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mmstream.decoding.bad_samples import Stats


class Lineage(NamedTuple):
    epoch: int
    step: int
    planned: list[tuple[str, int]]
    shown: list[tuple[str, int]]
    start: int = 0
    bad: tuple[Any, ...] = ()
    planned_rows: list[int] | None = None
    repeat: int = 1


class FakeLoader:
    """Rows [start, stop) of a global batch of `num_rows`; image and text are a row's own colour.

    `fail_at` raises at that step of an epoch, as a broken worker does; `asked` is the number of
    batches that were taken out of it.
    """

    def __init__(
        self,
        num_steps: int = 4,
        num_rows: int = 4,
        start: int = 0,
        stop: int | None = None,
        size: int = 32,
        fail_at: int | None = None,
        limit_at: int | None = None,
    ) -> None:
        self.num_steps, self.num_rows, self.size = num_steps, num_rows, size
        self.rows = range(start, num_rows if stop is None else stop)
        self.fail_at, self.limit_at = fail_at, limit_at
        self.epoch = self.step = self.asked = self.closed = 0
        self.stats = Stats()

    def __len__(self) -> int:
        return self.num_steps

    def iter_undelivered(self) -> Any:
        epoch = self.epoch
        try:
            for step in range(self.step, self.num_steps):
                if step == self.fail_at:
                    raise OSError(f"worker died at step {step}")
                self.asked += 1
                yield self.batch(epoch, step)
        finally:
            self.closed += 1

    def mark_delivered(self, batch: dict[str, Any]) -> None:
        lineage = batch["__lineage__"]
        assert (lineage.epoch, lineage.step) == (self.epoch, self.step), "counted out of order"
        if lineage.step == self.limit_at:
            raise RuntimeError("too many bad samples")
        self.step += 1
        if self.step == self.num_steps:
            self.epoch, self.step = self.epoch + 1, 0
        self.stats.num_samples += len(batch["__key__"])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.step = state["epoch"], state["step"]

    def batch(self, epoch: int, step: int) -> dict[str, Any]:
        numbers = [((step * self.num_rows + row) * 7 + epoch * 3) % 40 for row in self.rows]
        keys = [f"{epoch}-{step}-{row}" for row in self.rows]
        refs = [("made-up.tar", step * self.num_rows + row) for row in self.rows]
        images = torch.stack([self.image(number) for number in numbers])
        ids = torch.tensor([[1 + number, 2 + number // 8, 3, 0] for number in numbers])
        return {
            "image": images.contiguous(memory_format=torch.channels_last),
            "input_ids": ids,
            "attention_mask": (ids > 0).long(),
            "labels": ids,
            "__key__": keys,
            "__url__": ["made-up.tar"] * len(keys),
            "__valid__": torch.ones(len(keys), dtype=torch.bool),
            "__lineage__": Lineage(epoch, step, refs, refs, self.rows.start),
        }

    def image(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        shape = (3, self.size, self.size)
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


class RaggedLoader(FakeLoader):
    """Its rows all differ: 0 to 2 images, 0 to 3 tokens, some of them invalid."""

    def batch(self, epoch: int, step: int) -> dict[str, Any]:
        batch = super().batch(epoch, step)
        numbers = [step * self.num_rows + row for row in self.rows]
        counts = torch.tensor([number % 3 for number in numbers])
        lengths = torch.tensor([(number + 2) % 4 for number in numbers])
        batch["image"] = batch["image"].repeat_interleave(counts, dim=0)
        batch["image_row"] = torch.repeat_interleave(counts)
        batch["attention_mask"] = (torch.arange(4) < lengths[:, None]).long()
        batch["__valid__"] = torch.tensor([number % 5 != 3 for number in numbers])
        return batch

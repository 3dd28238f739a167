"""A fake loader of rows that all differ: 0 to 2 images, 0 to 3 tokens, some of them invalid."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.fake_loader import FakeLoader


class RaggedLoader(FakeLoader):
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

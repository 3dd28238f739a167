"""The model of the first loop: a small CLIP with random weights, and its loss over all ranks.

Nothing here depends on how the global batch is cut into ranks: no dropout, no batch statistics,
weights from a seed, and a loss over the embeddings of the whole global batch. So 1 and 2 ranks
compute the same losses and the same gradients, up to the rounding of sums in another order.

Why the gradients are exact. Rank r of W embeds its rows, e_r = f(x_r; w); all ranks gather
e = (e_1 ... e_W) and compute the same loss L(e, s), s being the temperature.
- The backward of the gather sums what the W copies of L give for e_r. The copies are equal, so it
  is W * dL/de_r, known without asking the other ranks. Rank r has then W * dL/de_r * de_r/dw.
- DDP averages over the ranks: 1/W * sum_r W * dL/de_r * de_r/dw = dL/dw.
- s enters L directly: each rank has dL/ds, and so has their mean.
No factor is left over for the learning rate or the loss. (The loop multiplies each rank's loss_sum
by W / weight of all ranks: with loss_sum = L * V / W over V valid rows that is L again.)
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mmstream._torchvision import import_torchvision
from mmstream.errors import ConfigError
from mmstream.types import Batch

__all__ = ["ContrastiveClip", "contrastive_loss", "gather_rows", "load_clip", "small_clip"]


class ContrastiveClip(nn.Module):
    """CLIP whose forward is the contrastive loss of the global batch.

    Args:
        clip: a `transformers` CLIPModel without dropout.
        num_rows: rows of the largest rank, ceil(global_batch_size / world_size): a rank with
            fewer is filled up with rows that do not count, since a gather wants equal parts.

    Attributes:
        image_size: side of the images in pixels.
        separable: False: each row's loss depends on all other rows, so the loss of a batch is not
            the mean over its parts and the loop neither accumulates nor cuts it.
    """

    separable = False

    def __init__(self, clip: Any, num_rows: int) -> None:
        super().__init__()
        self.clip = clip
        self.num_rows = num_rows
        self.image_size: int = clip.config.vision_config.image_size

    def weight_of(self, batch: Batch) -> Tensor:
        """Return the number of this rank's valid rows, a scalar."""
        valid: Tensor = batch["__valid__"]
        return valid.sum()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (loss_sum, weight): the loss times this rank's share of all valid rows, the share.

        The same on every rank, float32 scalars. Summed over the ranks loss_sum / weight is the
        loss, and weight the number of valid rows of the global batch.

        Args:
            batch: ``image``, normalised, floating [B, 3, S, S]; ``input_ids`` int64 [B, T];
                ``attention_mask`` int64 [B, T], 1 for text and 0 for padding, on either side;
                ``__valid__`` bool [B], where False leaves a row out of the loss on all ranks.

        Raises:
            ConfigError: samples with several images or none, or without text.
        """
        if not isinstance(batch.get("image"), Tensor) or "image_row" in batch:
            raise ConfigError(
                "train: CLIP takes exactly one image a sample; these have more or none"
            )
        if "input_ids" not in batch:
            raise ConfigError("train: CLIP takes a text for each image; there is none")
        image, mask = batch["image"], batch["attention_mask"]
        pooled = self.clip.vision_model(pixel_values=image).pooler_output
        hidden = self.clip.text_model(
            input_ids=batch["input_ids"], attention_mask=mask
        ).last_hidden_state
        # The last token that is text has seen all the others, whatever the tokenizer ends with.
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        last = (mask * positions).argmax(dim=1)
        text = hidden[torch.arange(hidden.shape[0], device=hidden.device), last]
        images = self.clip.visual_projection(pooled)
        texts = self.clip.text_projection(text)
        with torch.autocast(image.device.type, enabled=False):
            valid = gather_rows(batch["__valid__"], self.num_rows)
            loss = contrastive_loss(
                gather_rows(F.normalize(images.float(), dim=1), self.num_rows),
                gather_rows(F.normalize(texts.float(), dim=1), self.num_rows),
                valid,
                self.clip.logit_scale.clamp(max=math.log(100.0)).exp(),
            )
        weight = valid.sum() / (dist.get_world_size() if dist.is_initialized() else 1)
        return loss * weight, weight


def contrastive_loss(images: Tensor, texts: Tensor, valid: Tensor, scale: Tensor) -> Tensor:
    """Return CLIP's symmetric cross entropy over the valid rows (Radford et al., 2021), a scalar.

    Args:
        images: embeddings of unit length, float32 [G, D].
        texts: the same rows' texts, float32 [G, D].
        valid: bool [G]; at least one True. Invalid rows are neither asked nor offered as answers.
        scale: the inverse temperature, a scalar.
    """
    # Masks instead of images[valid]: a shape that depends on data would make the CPU wait for CUDA.
    logits = scale * images @ texts.T
    asked = torch.where(valid, torch.arange(len(valid), device=valid.device), -100)
    offered = ~valid[None, :]
    of_images = F.cross_entropy(logits.masked_fill(offered, -math.inf), asked)
    of_texts = F.cross_entropy(logits.T.masked_fill(offered, -math.inf), asked)
    return (of_images + of_texts) / 2


def gather_rows(rows: Tensor, num_rows: int) -> Tensor:
    """Return the rows of all ranks in rank order, [W * num_rows, ...], with gradients.

    Ranks with fewer than `num_rows` rows are filled up with zeros (False). On one rank, or without
    torch.distributed, these are the rows themselves.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    missing = num_rows - rows.shape[0]
    if missing:
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    gathered: Tensor = _Gather.apply(rows)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    """All ranks' rows; the backward needs no communication (see the module's docstring)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # noqa: ARG004
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        world_size = dist.get_world_size()
        return grad.chunk(world_size)[dist.get_rank()] * world_size


def small_clip(*, image_size: int, vocab_size: int, max_length: int, seed: int) -> Any:
    """Return a CLIPModel of 1.1 million weights (and the vocabulary's), random from `seed`.

    The same on every rank; torch's global random state is left as it was.
    """
    import_torchvision()  # which transformers imports in its turn
    from transformers import CLIPConfig, CLIPModel

    tower = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "attention_dropout": 0.0,
    }
    config = CLIPConfig(
        text_config={
            **tower,
            "vocab_size": vocab_size,
            "max_position_embeddings": max_length,
            "eos_token_id": 0,  # its own pooling's, which is not used: see ContrastiveClip
            "bos_token_id": 0,
            "pad_token_id": 0,
        },
        vision_config={**tower, "image_size": image_size, "patch_size": 16},
        projection_dim=128,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CLIPModel(config)


def load_clip(folder: str) -> Any:
    """Return the CLIPModel saved in a local folder, in float32; no code in it is run."""
    import_torchvision()
    from transformers import CLIPModel

    return CLIPModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)

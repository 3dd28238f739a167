"""CLIP for the training loop: a small one with random weights, or one from a folder.

    models.open_model -> `ContrastiveClip`, `clip_decode`

The loss is over the embeddings of the whole global batch. There is no dropout and there are no
batch statistics, and the weights come from a seed. So the number of ranks changes losses and
gradients by rounding errors only.

Why the gradients are exact: rank r of W embeds its rows, e_r = f(x_r; w). All ranks gather
e = (e_1 ... e_W) and compute the same loss L(e, s), where s is the temperature.

- The backward pass of the gather adds the gradients of the W copies of L. The copies are equal, so
  the sum is W * dL/de_r, and no communication is needed. Rank r gets W * dL/de_r * de_r/dw.
- DDP takes the mean over the ranks: 1/W * sum_r W * dL/de_r * de_r/dw = dL/dw.
- s enters L directly: each rank has dL/ds, and so has their mean.

The loop multiplies the loss_sum of each rank by W / total_weight. Here loss_sum is L * V / W and
total_weight is V, the number of valid rows. The product is L again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mmstream.batching.valid import is_flat
from mmstream.decoding.decode import Decode
from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.decoding.text.decoder import TextDecoder
from mmstream.errors import ConfigError
from mmstream.families.family import import_torchvision
from mmstream.train.tokenizer import load_pretrained
from mmstream.types import IGNORED_LABEL, Batch


class ContrastiveClip(nn.Module):
    """CLIP whose forward pass returns the contrastive loss of the global batch.

    Args:
        clip: a `transformers` CLIPModel without dropout.
        num_rows: rows of the rank that has the most. A gather needs equal shares, so the other
            ranks add rows that do not count.

    Attributes:
        image_size: side of the square images in pixels.
        separable: False. The loss of each row depends on all other rows, so a batch cannot be cut
            into micro-batches or accumulated.
    """

    separable = False
    takes = (
        'one image and one text a sample; model="vlm" takes chats, and docs/your-own-data.md has '
        "classes"
    )

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
        """Return (loss_sum, weight), two scalars that are the same on every rank.

        With W ranks and V valid rows in the global batch, weight is V / W and loss_sum is
        loss * V / W. So their sums over the ranks are loss * V and V.

        Args:
            batch: a dict with these fields:

                - image: normalised, floating [B, 3, S, S]
                - input_ids: int64 [B, T]
                - attention_mask: int64 [B, T], 1 for text and 0 for padding, on either side
                - __valid__: bool [B]; False leaves a row out of the loss on all ranks

        Raises:
            ConfigError: the samples have several images or none, or no text.
        """
        if is_flat(batch):
            raise ConfigError("train: CLIP compares whole rows: leave batching= out")
        if not isinstance(batch.get("image"), Tensor) or "image_row" in batch:
            raise ConfigError(
                "train: CLIP takes exactly one image per sample; these have several or none"
            )
        if "input_ids" not in batch:
            raise ConfigError("train: CLIP takes one text per image; these samples have no text")
        image = batch["image"]
        mask = batch["attention_mask"]
        pooled = self.clip.vision_model(pixel_values=image).pooler_output
        hidden = self.clip.text_model(
            input_ids=batch["input_ids"], attention_mask=mask
        ).last_hidden_state
        # The embedding of a text is that of its last token, which has attended to all others.
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        last = (mask * positions).argmax(dim=1)
        text = hidden[torch.arange(hidden.shape[0], device=hidden.device), last]
        image_embeddings = self.clip.visual_projection(pooled)
        text_embeddings = self.clip.text_projection(text)
        with torch.autocast(image.device.type, enabled=False):
            valid = gather_rows(batch["__valid__"], self.num_rows)
            loss = contrastive_loss(
                gather_rows(F.normalize(image_embeddings.float(), dim=1), self.num_rows),
                gather_rows(F.normalize(text_embeddings.float(), dim=1), self.num_rows),
                valid,
                self.clip.logit_scale.clamp(max=math.log(100.0)).exp(),
            )
        weight = valid.sum() / (dist.get_world_size() if dist.is_initialized() else 1)
        return loss * weight, weight


def contrastive_loss(images: Tensor, texts: Tensor, valid: Tensor, scale: Tensor) -> Tensor:
    """Return CLIP's symmetric cross entropy over the valid rows (Radford et al., 2021), a scalar.

    Args:
        images: image embeddings of unit length, float32 [G, D].
        texts: text embeddings of the same rows, float32 [G, D].
        valid: bool [G], with at least one True. Invalid rows have no loss, and no other row can
            match them.
        scale: the inverse temperature, a scalar.
    """
    # Masks, not images[valid]: a shape that depends on the data would make the CPU wait for CUDA.
    logits = scale * images @ texts.T
    targets = torch.where(valid, torch.arange(len(valid), device=valid.device), IGNORED_LABEL)
    invalid = ~valid[None, :]
    image_loss = F.cross_entropy(logits.masked_fill(invalid, -math.inf), targets)
    text_loss = F.cross_entropy(logits.T.masked_fill(invalid, -math.inf), targets)
    return (image_loss + text_loss) / 2


def gather_rows(rows: Tensor, num_rows: int) -> Tensor:
    """Return the rows of all ranks in rank order, [W * num_rows, ...], with gradients.

    Ranks with fewer than `num_rows` rows add rows of zeros (False). For example, ranks with 2 and 1
    rows and ``num_rows=2`` give 4 rows, the last of them zeros. On one rank, or without
    torch.distributed, the result is `rows` itself.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    missing = num_rows - rows.shape[0]
    if missing:
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    gathered: Tensor = _Gather.apply(rows)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    """Gathers the rows of all ranks. The backward pass needs no communication (see the module)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # noqa: ARG004
        gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, rows.contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        world_size = dist.get_world_size()
        return grad.chunk(world_size)[dist.get_rank()] * world_size


def small_clip(*, image_size: int, vocab_size: int, max_length: int, seed: int) -> Any:
    """Return a CLIPModel with random weights: 1.1 million, and those of the token embeddings.

    `seed` fixes the weights, so they are the same on every rank. The global random state of torch
    does not change.
    """
    import_torchvision()  # transformers imports it too
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
            "eos_token_id": 0,  # for the pooling of CLIPModel; ContrastiveClip has its own
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
    """Return the CLIPModel that is saved in a local folder, in float32. No code in it is run.

    Raises:
        ConfigError: there is no such model.
    """
    return load_pretrained("CLIPModel", folder, f"{folder}: no CLIP model", dtype="float32")


def clip_decode(tokenizer: Any, model: ContrastiveClip, max_length: int) -> Decode:
    """Return the decoders that make the fields that a `ContrastiveClip` reads."""
    text = TextDecoder(tokenizer, max_length=max_length, padding="longest")
    return Decode(image=ImageDecoder(size=model.image_size), text=text)

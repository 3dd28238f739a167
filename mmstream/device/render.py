"""Decoded pictures -> the planned results, on the device, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mmstream.decoding.image.geometry import View

__all__ = ["render"]


def render(
    output: torch.Tensor, pictures: torch.Tensor, view: View, interpolation: str, fill: torch.Tensor
) -> None:
    """Write pictures into `output`, as `decoding.image.resize.render` does on the CPU.

    Args:
        output: where the results go, float32 [N, 3, H, W].
        pictures: uint8 [N, 3, H, W], upright.
        view: crop, size and flip.
        interpolation: "bilinear" or "bicubic".
        fill: colour of padding, float32 [3], 0 to 255.
    """
    top, left, height, width = view.box
    results = pictures[:, :, top : top + height, left : left + width].to(torch.float32)
    if view.resized != (height, width):
        results = F.interpolate(
            results, view.resized, mode=interpolation, align_corners=False, antialias=True
        )
    top, left = view.offset
    height, width = view.shape
    results = results[:, :, max(0, -top) :, max(0, -left) :][:, :, :height, :width]
    if view.flip:
        results = results.flip(3)
    if results.shape != output.shape:
        output.copy_(fill[:, None, None].expand_as(output))
        output = output[:, :, max(0, top) :, max(0, left) :]
        output = output[:, :, : results.shape[2], : results.shape[3]]
    output.copy_(results)

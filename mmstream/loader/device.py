"""The device stage: moves batches to the device, one batch ahead of the user's code.

    loader -> device -> train

`to_device` wraps a loader. While the user's code works on a batch, the next batch is copied from
pinned memory and normalised, on a separate CUDA stream.

A batch that was only fetched ahead is not delivered. So the batches come from
`loader.iter_undelivered()`, and `loader.mark_delivered(batch)` is called when a batch is handed
over. The state therefore always says what the user's code has received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mmstream.batching.collate import plain_tensors
from mmstream.errors import ConfigError
from mmstream.settings import arguments_gone, checked, shown
from mmstream.types import Batch

if TYPE_CHECKING:
    from mmstream.loader.loader import Loader

MovedBatch = tuple[Batch, Batch, torch.cuda.Event | None]
"""The batch on the host, the same batch on the device, and the CUDA event after its copy."""

_ADVICE = {
    **arguments_gone("to_device"),
    "device": 'give "cpu", "cuda" or "cuda:N"',
    "normalize": "pass mm.Normalize(mean=, std=)",
    "dtype": "give a floating type, such as torch.bfloat16",
}
"""What to write in place of wrong arguments."""

T = TypeVar("T")


@checked(_ADVICE, own=("loader",))
def to_device(
    loader: Loader,
    device: str | torch.device,
    *,
    normalize: Normalize | None = None,
    dtype: torch.dtype | None = None,
) -> DeviceLoader:
    """Return a loader's batches on a device. The next batch is moved while you use this one.

    Each batch is a dict with the same fields, in the same order of batches and rows:

    - Tensors are on the device, also those inside lists, tuples and dicts. So is ``__valid__``,
      bool [B], which a loss needs.
    - Other fields whose names begin with ``__`` stay on the host, and so do strings and bytes.
    - ``image`` is uint8 [B, C, H, W] without `normalize` and `dtype`, else floating. Its memory
      format is channels_last. Images of different sizes are a list of [C, H, W]. The same holds for
      pictures that a `Decode` names by field, but not for masks.
    - The frames of videos are treated as pictures are. Recordings, features and times are moved.

    On CUDA, the copy and the normalisation run on a separate stream. The tensors may be used on the
    stream that is current when the batch is handed over. Memory: one batch more than without this
    stage, on the host and on the device. Nothing starts before the first batch is asked for.

    Args:
        loader: an `mmstream.Loader`, or anything with its methods and its `stats`.
        device: "cpu", "cuda" or "cuda:N". "cuda" is the CUDA device that is current at the first
            batch.
        normalize: applied to ``batch["image"]``, to pictures by field and to the frames of videos,
            on the device, computed in float32. Other fields, such as those of a `collate` of yours,
            stay as they are. None: no normalisation.
        dtype: floating type of the images and videos. With `normalize`, None means float32. Without
            `normalize`, a `dtype` scales the images to 0..1, and None leaves them uint8.

    Returns:
        An iterable of the batches of an epoch, as `Loader` yields them, with the length, state and
        stats of `loader`. Save its ``state_dict()``: it counts what you have received, not what was
        fetched ahead.

    Raises:
        ConfigError: `dtype` is not floating, or torch knows no such `device`. While iterating:
            there is no CUDA device, or the images do not fit the settings.

    Examples:
        >>> import torch
        >>> decode = mm.Decode(image=mm.ImageDecoder(size=64))
        >>> pipeline = mm.Pipeline(mm.open_dataset("shards/"), global_batch_size=8, decode=decode)
        >>> normalize = mm.Normalize(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        >>> loader = mm.Loader(pipeline)
        >>> batches = mm.to_device(loader, "cpu", normalize=normalize, dtype=torch.bfloat16)
        >>> batch = next(iter(batches))
        >>> batch["image"].dtype, tuple(batch["image"].shape)
        (torch.bfloat16, (8, 3, 64, 64))
        >>> batches.state_dict()["step"]  # delivered; the batch ahead does not count
        1
    """
    if not hasattr(loader, "iter_undelivered"):
        advice = "pass an mm.Loader"
        if hasattr(loader, "global_batch_size"):
            advice = "pass mm.to_device(mm.Loader(pipeline), ...)"
        elif hasattr(loader, "plan_order"):
            advice = (
                "pass mm.to_device(mm.Loader(mm.Pipeline(dataset, global_batch_size=...)), ...)"
            )
        raise ConfigError(f"to_device: got {type(loader).__name__}: {advice}")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype}: {_ADVICE['dtype']}")
    try:
        device = torch.device(device)
    except RuntimeError:  # its message lists all devices that torch has ever known
        raise ConfigError(f"device={shown(device)}: {_ADVICE['device']}") from None
    return DeviceLoader(loader, device, normalize, dtype)


@dataclass(frozen=True)
class DeviceLoader:
    """A loader's batches on a device, with the loader's length, state and stats (see `to_device`).

    Each ``for`` yields what a ``for`` over the `Loader` yields. A batch that was only fetched ahead
    does not count as delivered. An error in the next batch is raised after the present batch was
    handed over.
    """

    loader: Loader
    device: torch.device
    normalize: Normalize | None = None
    dtype: torch.dtype | None = None
    _streams: list[torch.cuda.Stream] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def stats(self) -> Any:
        """Counts of what was delivered so far: the loader's."""
        return self.loader.stats

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state: after the last batch handed over, not the last one fetched."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a state was saved; the next ``for`` starts there."""
        self.loader.load_state_dict(state)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Set the weights of a mixture from the batch after the one that is fetched ahead."""
        self.loader.set_weights(weights)

    def __iter__(self) -> Iterator[Batch]:
        batches = self.loader.iter_undelivered()
        with plain_tensors():
            mover = _Mover(self)
        try:
            for host_batch, batch, copied in _one_ahead(mover.moves(batches)):
                if copied is not None:
                    _hand_over(batch, copied, torch.cuda.current_stream(mover.device))
                self.loader.mark_delivered(host_batch)
                yield batch
        finally:
            if hasattr(batches, "close"):
                batches.close()  # after a `break`, end the loader's iterator at once


class _Mover:
    """Moves batches to the device: copy, channels_last, normalise.

    On CUDA it works on a side stream, so that it does not wait for the user's kernels.

    Attributes:
        device: the device. On CUDA with its number, as threads differ in their current device.
    """

    def __init__(self, stage: DeviceLoader) -> None:
        self._stage, self.device = stage, stage.device
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            if not stage._streams:  # reused in each epoch: every stream has its own pool of memory
                stage._streams.append(_side_stream_of(self.device))
            self._stream = stage._streams[0]
            self.device = self._stream.device
        dtype = stage.dtype if stage.normalize is None else stage.dtype or torch.float32
        with self._side_stream():
            self._normalizer = (
                None if dtype is None else Normalizer(stage.normalize, dtype, self.device)
            )
        self._dtype = dtype
        decode = getattr(getattr(stage.loader, "pipeline", None), "decode", None)
        self._picture_names = {"image", *getattr(decode, "picture_names", ())}

    def moves(self, batches: Iterator[Batch]) -> Iterator[MovedBatch]:
        """Start to move each batch, and yield it.

        The loader's thread for pinned memory takes the device that is current here when the first
        batch is fetched. With another one, it would begin a CUDA context there.
        """
        while True:
            with self._side_stream():
                batch = next(batches, None)
            if batch is None:
                return
            with plain_tensors():
                moved = self._move(batch)
            yield moved

    def _move(self, host_batch: Batch) -> MovedBatch:
        with self._side_stream():
            batch = {}
            for name, value in host_batch.items():
                if name in self._picture_names:
                    batch[name] = _map_tensors(value, self._move_image)
                elif name == "__valid__" or not name.startswith("__"):
                    batch[name] = _map_tensors(value, self._copy)
                else:
                    batch[name] = value
            return host_batch, batch, self._stream.record_event() if self._stream else None

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        # torch.cuda.stream alone makes the device before current again, and CUDA begins a context
        # of several hundred MB there. torch.cuda.device does not.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._stream is None:  # without pinned memory, the host may not write it before the copy
            return tensor.to(self.device)
        if not tensor.is_cuda:
            # A no-op if the loader has pinned the batch. The allocator keeps the pinned memory
            # until the copy on this stream is done, even if the tensor is dropped before.
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _move_image(self, tensor: torch.Tensor) -> torch.Tensor:
        image = self._copy(tensor)
        if image.ndim == 4:
            image = image.contiguous(memory_format=torch.channels_last)
        if self._stage.normalize is not None and image.dtype != torch.uint8:
            raise ConfigError(f"to_device: normalize takes uint8 images, these are {image.dtype}")
        if self._normalizer is None or image.is_floating_point():
            return image if self._dtype is None else image.to(self._dtype)
        return self._normalizer(image)


def _side_stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return a new stream on a CUDA device.

    Raises:
        ConfigError: there is no such device.
    """
    if not torch.cuda.is_available():
        raise ConfigError('to_device: no CUDA device is visible; use device "cpu"')
    num_devices = torch.cuda.device_count()
    if device.index is not None and device.index >= num_devices:
        raise ConfigError(
            f"to_device: there is no {device}: this process sees {num_devices} CUDA devices, from "
            "cuda:0 on"
        )
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield each item after its successor was fetched.

    An error in fetching the successor is raised after the present item was yielded.
    """
    error: Exception | None = None
    following = next(items, None)
    while following is not None:
        item = following
        following = None
        try:
            following = next(items, None)
        except Exception as raised:
            error = raised
        yield item
    if error is not None:
        raise error


def _hand_over(batch: Batch, copied: torch.cuda.Event, user_stream: torch.cuda.Stream) -> None:
    """Let the user's stream wait for this batch, and keep its memory until that stream is done.

    It waits for the event of this batch only: the next batch may still be on its way.
    """
    user_stream.wait_event(copied)

    def record_use(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:  # else the side stream could reuse the memory while it is still read
            tensor.record_stream(user_stream)
        return tensor

    _map_tensors(batch, record_use)


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to every tensor in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: _map_tensors(item, function) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(item, function) for item in value)
    return value


# -- uint8 images become the floating numbers that a model takes -----------------------------------

GROUP_NUMBERS = 2**26
"""Numbers that are normalised at a time: 256 MiB as float32, beside the result.

The frames of many videos are more than that.
"""


@dataclass(frozen=True, init=False)
class Normalize:
    """Normalisation of images: ``(x / 255 - mean) / std`` per channel, for uint8 pixels x.

    Args:
        mean: one number per channel, on the scale 0..1. A single number applies to all channels.
        std: as many numbers, each above 0, on the same scale.

    Raises:
        ConfigError: `mean` is empty, the lengths differ, a `std` is not above 0, or the numbers are
            on the scale 0..255.

    Examples:
        >>> to_plus_minus_one = mm.Normalize(mean=0.5, std=0.5)
        >>> imagenet = mm.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __init__(self, mean: float | Iterable[float], std: float | Iterable[float]) -> None:
        object.__setattr__(self, "mean", _numbers("mean", mean))
        object.__setattr__(self, "std", _numbers("std", std))
        if not self.mean or len(self.mean) != len(self.std):
            raise ConfigError(
                f"Normalize: {len(self.mean)} means and {len(self.std)} stds: give one mean and "
                "one std per channel"
            )
        if min(self.std) <= 0:
            raise ConfigError(f"Normalize: std must be above 0, not {min(self.std)}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if not all(abs(value) <= 1 for value in values):
                raise ConfigError(
                    f"Normalize: {name}={values} is not on the scale 0 to 1: divide mean and std "
                    "by 255"
                )


def _numbers(name: str, values: float | Iterable[float]) -> tuple[float, ...]:
    """Return the numbers of all channels, or the single one."""
    try:
        numbers = (values,) if isinstance(values, Real) else tuple(values)  # type: ignore[arg-type]
        if not any(isinstance(number, bool | str) for number in numbers):
            return tuple(float(number) for number in numbers)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(f"Normalize: {name}={shown(values)}: give a number, or one per channel")


class Normalizer:
    """Computes ``(x / 255 - mean) / std`` in float32, then rounds once to `dtype`.

    The result has the same bits on every device: each operation of the formula is correctly
    rounded.

    Args:
        normalize: None: ``x / 255``, which scales to 0..1.
        dtype: floating type of the result.
        device: the device of the images.
    """

    def __init__(
        self,
        normalize: Normalize | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._dtype = dtype
        # Division by a Python number would make CUDA multiply by the rounded 1/255, which gives
        # other bits than the CPU. Division by a tensor does not.
        self._scale = torch.tensor(255.0, dtype=torch.float32, device=device)
        self._mean = self._std = None
        if normalize is not None:
            self._mean = torch.tensor(normalize.mean, dtype=torch.float32, device=device)
            self._std = torch.tensor(normalize.std, dtype=torch.float32, device=device)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Normalise uint8 images, [B, C, H, W] or [C, H, W].

        Returns:
            A new tensor of the same shape and memory format.

        Raises:
            ConfigError: the number of means does not fit the channels.
        """
        if self._mean is not None and len(self._mean) not in (1, image.shape[-3]):
            raise ConfigError(
                f"Normalize: {len(self._mean)} means for images of {image.shape[-3]} channels"
            )
        if image.ndim == 3 or image.numel() <= GROUP_NUMBERS:
            return self._at_once(image)
        result = torch.empty_like(image, dtype=self._dtype)
        num_images = max(1, GROUP_NUMBERS // image[0].numel())
        for start in range(0, len(image), num_images):
            group = image[start : start + num_images]
            result[start : start + num_images] = self._at_once(group)
        return result

    def _at_once(self, image: torch.Tensor) -> torch.Tensor:
        """Normalise images as the formula is written."""
        result = image.to(torch.float32).div_(self._scale)
        if self._mean is not None and self._std is not None:
            result.sub_(self._mean.view(-1, 1, 1)).div_(self._std.view(-1, 1, 1))
        return result.to(self._dtype)

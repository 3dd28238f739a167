"""Stage 6 of 7: batches from the host to the device, one ahead of the user's code.

    loader -> device -> train

`to_device` wraps a loader. While the user's code works on one batch, the next one is already copied
from pinned memory and normalised on a CUDA stream of its own. Looking ahead must not count: the
batches come from `loader.iter_undelivered()`, and `loader.mark_delivered(batch)` is called when a
batch is handed over. A state then says at any moment what the user's code has really received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from mmstream.decoding.batch_memory import BatchMemory
from mmstream.device.normalize import Normalize, Normalizer
from mmstream.errors import ConfigError
from mmstream.types import Batch

if TYPE_CHECKING:  # decoders are slow to import, and few batches need one here
    from mmstream.device.nvjpeg import DecodeJpegs, DeviceDecoder

__all__ = ["DeviceLoader", "Normalize", "UndeliveredLoader", "to_device"]

Moved = tuple[Batch, Batch, torch.cuda.Event | None]
T = TypeVar("T")


class UndeliveredLoader(Protocol):
    """What `to_device` asks of a loader: torch's Stateful protocol, with the counting apart.

    `iter_undelivered` yields the rest of the epoch and leaves the state where it is.
    `mark_delivered` moves the state past one batch, and may raise BadSampleLimitError.
    """

    @property
    def stats(self) -> Any: ...  # noqa: D102
    def __len__(self) -> int: ...
    def iter_undelivered(self) -> Iterator[Batch]: ...  # noqa: D102
    def mark_delivered(self, batch: Batch) -> None: ...  # noqa: D102
    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    def load_state_dict(self, state: dict[str, Any]) -> None: ...  # noqa: D102


def to_device(
    loader: UndeliveredLoader,
    device: str | torch.device,
    *,
    normalize: Normalize | None = None,
    dtype: torch.dtype | None = None,
    decode_jpegs: DecodeJpegs | None = None,
) -> DeviceLoader:
    """Return the loader's batches on a device, one batch ahead.

    A batch stays a dict. Its tensors are moved, also those in lists, tuples and dicts, and so is
    ``__valid__``, which a loss needs; the other ``__names__`` stay on the host, as do strings.
    4-dimensional images are channels_last. Nothing is moved or started before the first batch is
    asked for. One more batch than without this stage is held in memory, on both sides.

    Args:
        loader: an `mmstream.Loader`, or anything with the methods of `UndeliveredLoader`.
        device: "cuda", "cuda:1", "cpu"; "cuda" is the current CUDA device at the first batch.
        normalize: applied to ``batch["image"]`` on the device, in float32, before `dtype`. None
            with a `dtype` only scales to 0..1.
        dtype: floating type of the images; None means float32 with `normalize`, and uint8 as they
            come without it.
        decode_jpegs: what decodes the files that ``ImageDecoder(device="cuda")`` leaves to the
            device; None: nvJPEG, on CUDA only.

    Raises:
        ConfigError: `dtype` is not floating.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"to_device: images become floating numbers, not {dtype}")
    return DeviceLoader(loader, torch.device(device), normalize, dtype, decode_jpegs)


@dataclass(frozen=True)
class DeviceLoader:
    """Iterates like the loader it wraps, with the same length, state and stats (see `to_device`).

    Each ``for`` is one epoch from where the state stands. Leaving it early loses nothing: what was
    fetched ahead was never counted and comes again. An error met while looking ahead is raised in
    its turn, after the batch before it has been handed over.
    """

    loader: UndeliveredLoader
    device: torch.device
    normalize: Normalize | None = None
    dtype: torch.dtype | None = None
    decode_jpegs: DecodeJpegs | None = None
    _memory: BatchMemory = field(default_factory=BatchMemory, init=False, repr=False, compare=False)
    _streams: list[torch.cuda.Stream] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def stats(self) -> Any:
        """The loader's counts."""
        return self.loader.stats

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state: what was handed over here, not what was fetched ahead."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the loader where a saved state says; the next ``for`` starts there."""
        self.loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Batch]:
        batches = self.loader.iter_undelivered()
        mover = _Mover(self)
        try:
            for result in _one_ahead(map(mover.start, batches)):
                host, moved, copied = result()
                if copied is not None:
                    _hand_over(moved, copied, torch.cuda.current_stream(self.device))
                self.loader.mark_delivered(host)
                yield moved
        finally:
            mover.close()
            if hasattr(batches, "close"):
                batches.close()  # a break here ends the loader's iterator too, not some time later


class _Mover:
    """Starts a batch's way to the device: copy, channels_last, normalise, on a side stream."""

    def __init__(self, stage: DeviceLoader) -> None:
        self._stage, self._device = stage, stage.device
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            if not torch.cuda.is_available():
                raise ConfigError('to_device: no CUDA device is to be seen here; "cpu" works')
            if not stage._streams:  # one for good: each has its own pool of memory
                stage._streams.append(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
            self._stream = stage._streams[0]
            self._device = self._stream.device  # with its number, which threads do not share
        self._decoder: DeviceDecoder | None = None
        self._pool: ThreadPoolExecutor | None = None
        dtype = stage.dtype if stage.normalize is None else stage.dtype or torch.float32
        with self._side():
            self._normalizer = (
                None
                if dtype is None
                else Normalizer(stage.normalize, dtype, self._device, stage._memory)
            )
        self._dtype = dtype

    def start(self, host: Batch) -> Callable[[], Moved]:
        """Begin with a batch; what is returned waits for the end.

        The host waits for nvJPEG, so that is done in a thread, while the user's code goes on.
        """
        if not _is_encoded(host.get("image")):
            moved = self._move(host)
            return lambda: moved
        if self._decoder is None or self._pool is None:
            self._decoder = _decoder_of(self._stage, self._device)
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="mmstream-device")
        return self._pool.submit(self._decode, host, self._decoder).result

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _decode(self, host: Batch, decoder: DeviceDecoder) -> Moved:
        with self._side():
            host = decoder(host)
        return self._move(host)

    def _move(self, host: Batch) -> Moved:
        """Return (the host's batch, the device's, the event after its copy)."""
        with self._side():
            moved = {
                name: _map(value, self._image if name == "image" else self._copy)
                if name == "__valid__" or not name.startswith("__")
                else value
                for name, value in host.items()
            }
            return host, moved, self._stream.record_event() if self._stream else None

    def _side(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._stream is not None and not tensor.is_cuda:
            # A no-op where the loader has pinned the batch. The allocator keeps the pinned block
            # until the copy on this stream is done, also when the tensor is dropped before.
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def _image(self, tensor: torch.Tensor) -> torch.Tensor:
        image = self._copy(tensor)
        if image.ndim == 4:
            image = image.contiguous(memory_format=torch.channels_last)
        if self._stage.normalize is not None and image.dtype != torch.uint8:
            raise ConfigError(f"to_device: normalises uint8 images, these are {image.dtype}")
        if self._normalizer is None or image.is_floating_point():
            return image if self._dtype is None else image.to(self._dtype)
        return self._normalizer(image)


def _is_encoded(images: Any) -> bool:
    if images is None or isinstance(images, torch.Tensor | list):
        return False
    from mmstream.decoding.image.encoded import EncodedImages

    return isinstance(images, EncodedImages)


def _decoder_of(stage: DeviceLoader, device: torch.device) -> DeviceDecoder:
    """Return what decodes the files that a stage meets."""
    from mmstream.device.nvjpeg import DeviceDecoder, nvjpeg

    if stage.decode_jpegs is None and device.type != "cuda":
        raise ConfigError(
            'ImageDecoder(device="cuda") leaves JPEGs to the GPU: to_device(loader, "cuda"), '
            f'not "{device}", or ImageDecoder(device="cpu")'
        )
    source = getattr(getattr(stage.loader, "pipeline", None), "dataset", None)
    return DeviceDecoder(device, stage.decode_jpegs or nvjpeg, source)


def _one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items, each when the next is already there; an error waits for its turn."""
    error: Exception | None = None
    ahead = next(items, None)
    while ahead is not None:
        item, ahead = ahead, None
        try:
            ahead = next(items, None)
        except Exception as raised:
            error = raised
        yield item
    if error is not None:
        raise error


def _hand_over(moved: Batch, copied: torch.cuda.Event, consumer: torch.cuda.Stream) -> None:
    """Let the user's stream wait for this batch (the next may still be on its way) and own it."""
    consumer.wait_event(copied)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:  # else the side stream would reuse the memory while it is still read
            tensor.record_stream(consumer)
        return tensor

    _map(moved, own)


def _map(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to every tensor in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: _map(item, function) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_map(item, function) for item in value)
    return value

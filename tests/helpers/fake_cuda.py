"""A CUDA device that is not there: tensors without content, and streams that note what they do.

The tensors are those of torch's `FakeTensorMode`. They have shapes, types and devices, so tensors
of two devices that meet raise an error. `FakeCuda` stands in for streams, events, pinned memory and
the current device. It follows what each stream has waited for, and fails where CUDA would read
memory that is not written yet, or might give memory away that is still read.

A build of torch without CUDA cannot index such tensors by ``[]``, and has no gradients of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(eq=False)
class FakeStream:
    """A stream: how many kernels it has, and how many of each other stream it has waited for."""

    device: torch.device
    cuda: FakeCuda
    seen: dict[int, int] = field(default_factory=dict)
    """id of a stream -> its kernels that are done before the next one of this stream."""

    def launch(self) -> int:
        """Add a kernel, and return its number."""
        self.seen[id(self)] = self.seen.get(id(self), 0) + 1
        return self.seen[id(self)]

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self.cuda)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        for stream, number in event.seen.items():
            self.seen[stream] = max(number, self.seen.get(stream, 0))

    def synchronize(self) -> None:
        self.cuda.host_waits.append("stream.synchronize")


class FakeEvent:
    """An event: what its stream had done when it was recorded."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.seen: dict[int, int] = {}

    def record(self, stream: FakeStream | None = None) -> None:
        self.seen = dict((stream or self._cuda.current_stream()).seen)


class FakeCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The devices of a process.

    Args:
        num_devices: how many there are.

    Attributes:
        contexts: numbers of the devices on which CUDA would have begun a context.
        host_waits: the calls that made the host wait for a device.
        num_copies: copies from the host to a device.
    """

    def __init__(self, num_devices: int = 2) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_devices = num_devices
        self.contexts: set[int] = set()
        self.host_waits: list[str] = []
        self.num_copies = 0
        self._default_streams = [
            FakeStream(torch.device("cuda", number), self) for number in range(num_devices)
        ]
        self._streams = list(self._default_streams)  # so that no two have one id
        self._thread = threading.local()
        self._written: dict[int, tuple[FakeStream, int]] = {}  # storage -> its newest kernel
        self._home: dict[int, FakeStream] = {}  # storage -> where it was allocated
        self._recorded: dict[int, set[int]] = {}  # storage -> streams that keep it
        self._pinned: set[int] = set()
        self._storages: list[Any] = []  # kept, so that no two have one address

    # ---- what stands in for torch.cuda

    def new_stream(self, device: torch.device | None = None) -> FakeStream:
        number = self.current_device() if device is None else self._number(device)
        self.contexts.add(number)
        self._streams.append(FakeStream(torch.device("cuda", number), self))
        return self._streams[-1]

    def current_device(self) -> int:
        return getattr(self._thread, "device", 0)  # of a new thread: 0

    def set_device(self, device: torch.device | int) -> None:
        self._thread.device = self._number(device)
        self.contexts.add(self._thread.device)

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        number = self.current_device() if device is None else self._number(device)
        streams: dict[int, FakeStream] = self._thread.__dict__.setdefault("streams", {})
        return streams.get(number, self._default_streams[number])

    @contextmanager
    def on_device(self, device: torch.device | int) -> Iterator[None]:
        """Do what ``torch.cuda.device`` does. The device before gets no context at the end."""
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self._thread.device = before

    @contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        """Do what ``torch.cuda.stream`` does. At the end it sets the device before."""
        before, before_there = self.current_stream(), self.current_stream(stream.device)
        self._set_stream(stream)
        try:
            yield
        finally:
            if before.device != stream.device:
                self._set_stream(before_there)
            self._set_stream(before)

    def _set_stream(self, stream: FakeStream) -> None:
        if self.current_device() != stream.device.index:
            self.set_device(stream.device)
        self._thread.__dict__.setdefault("streams", {})[stream.device.index] = stream

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._key(tensor) in self._pinned:
            return tensor
        pinned = torch.empty_like(tensor)
        self._pinned.add(self._key(pinned))
        return pinned

    def record_stream(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self._recorded.setdefault(self._key(tensor), set()).add(id(stream))

    # ---- what kernels do

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function)
        if name == "aten._local_scalar_dense.default":
            self.host_waits.append(name)
            return 0.0
        result = function(*args, **(kwargs or {}))
        if name.startswith("prim."):
            return result
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device for tensor in (*inputs, *outputs)}
        if name in ("aten._to_copy.default", "aten.copy_.default") and len(devices) > 1:
            self._copy(name, inputs, (kwargs or {}).get("non_blocking") or args[2:] == (True,))
        on_cuda = [device for device in devices if device.type == "cuda"]
        if on_cuda:
            self._launch(name, self.current_stream(on_cuda[0]), inputs, outputs)
        return result

    def _copy(self, name: str, inputs: list[torch.Tensor], non_blocking: bool) -> None:
        source = inputs[-1]
        if not non_blocking:
            self.host_waits.append(f"{name} from {source.device.type}")
        else:
            assert source.is_cuda or self._key(source) in self._pinned, "copied while it may change"
            assert not source.is_cuda, "the host would read what is not copied yet"
        self.num_copies += not source.is_cuda

    def _launch(
        self,
        name: str,
        stream: FakeStream,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        assert stream.device.index is not None
        self.contexts.add(stream.device.index)
        number = stream.launch()
        for tensor in (*inputs, *outputs):
            if not tensor.is_cuda:
                continue
            key = self._key(tensor)
            home = self._home.setdefault(key, stream)
            writer, kernel = self._written.get(key, (stream, 0))
            assert stream.seen.get(id(writer), 0) >= kernel, f"{name} reads before it is written"
            kept_by = self._recorded.get(key, set())
            assert stream is home or id(stream) in kept_by, f"{name}: memory may be given away"
        for tensor in outputs:
            if tensor.is_cuda:
                self._written[self._key(tensor)] = stream, number

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self._storages.append(storage)
        return int(storage._cdata)

    def _number(self, device: torch.device | int) -> int:
        index = device if isinstance(device, int) else device.index
        return self.current_device() if index is None else index


class _FakeTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Tensors without content, also where they are copied to CUDA from a number of the host."""

    avoid_device_init = True


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch, num_devices: int = 2) -> Iterator[FakeCuda]:
    """Let this process have CUDA devices, while this context lasts."""
    cuda = FakeCuda(num_devices)
    with ExitStack() as stack:
        patch = stack.enter_context(monkeypatch.context())
        stands_in = {
            "is_available": lambda: True,
            "device_count": lambda: num_devices,
            "is_bf16_supported": lambda *_: True,
            "current_device": cuda.current_device,
            "set_device": cuda.set_device,
            "current_stream": cuda.current_stream,
            "device": cuda.on_device,
            "stream": cuda.on_stream,
            "Stream": cuda.new_stream,
            "Event": lambda **_: FakeEvent(cuda),
        }
        for name, function in stands_in.items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: cuda.pin_memory(tensor))
        patch.setattr(
            torch.Tensor, "record_stream", lambda tensor, by: cuda.record_stream(tensor, by)
        )
        stack.enter_context(_FakeTensors())
        stack.enter_context(cuda)
        yield cuda

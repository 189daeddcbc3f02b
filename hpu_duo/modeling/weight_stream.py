"""Weights in host memory or on a disk that pass through a few buffers of the device, layer by layer."""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch import nn

from hpu_duo.config.limits import check_cpu_offload
from hpu_duo.device import DeviceRuntime
from hpu_duo.device.runtime import host_memory
from hpu_duo.device.streams import CopiesAside, CopyStream, Mark
from hpu_duo.not_picklable import NotPicklable

_ALIGNMENT = 64
_GIB = 1 << 30
_library = torch.library.Library("hpu_duo_weights", "DEF")
_library.define("arrive(Tensor(a!) buffer, int stream, int layer) -> ()")
_streams: weakref.WeakValueDictionary[int, WeightStream] = weakref.WeakValueDictionary()


def _arrive(buffer: torch.Tensor, stream: int, layer: int) -> None:
    _streams[stream].arrive(layer)


_library.impl("arrive", _arrive, "CompositeExplicitAutograd")
_library.impl("arrive", lambda *_: None, "Meta")
_operator = torch.ops.hpu_duo_weights.arrive.default


class InFile:
    """Weights in an unnamed file of a folder, which the system removes with the process.

    Args:
        folder: on the disk.
        weights: bytes to write, uint8 ``[B]``.

    Attributes:
        nbytes: their number.

    Raises:
        ValueError: they cannot be written there.
    """

    def __init__(self, folder: Path, weights: torch.Tensor) -> None:
        self.nbytes = weights.nbytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file, path = tempfile.mkstemp(dir=folder)
            weakref.finalize(self, os.close, self._file)
            os.unlink(path)
            rest = weights.numpy().data
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise ValueError(
                f"expected offload_disk to be a folder with room for {self.nbytes:,} bytes of weights, "
                f"got {folder}: {error.strerror}"
            ) from None

    def expect(self) -> None:
        """Let the system begin to read them."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, 0, self.nbytes, os.POSIX_FADV_WILLNEED)

    def read(self, target: torch.Tensor) -> None:
        """Read all of them into memory of the host, uint8 ``[B]``.

        Raises:
            OSError: they cannot be read.
        """
        rest, offset = target.numpy().data, 0
        while rest:
            num_bytes = os.preadv(self._file, [rest], offset)
            if not num_bytes:
                raise OSError(f"expected {self.nbytes:,} bytes of weights in a file, got {offset:,}")
            rest, offset = rest[num_bytes:], offset + num_bytes
        if hasattr(os, "posix_fadvise"):
            # Read once in a step: kept pages would only displace those of others.
            os.posix_fadvise(self._file, 0, self.nbytes, os.POSIX_FADV_DONTNEED)


Weights: TypeAlias = torch.Tensor | InFile
"""Weights of a layer on the host, uint8 ``[B]``, or on a disk."""


class Move(Protocol):
    """A copy that has begun."""

    def hold(self) -> None:
        """Let computation that is launched from now on wait for it."""
        ...


class Mover(Protocol):
    """Copies weights from the host or a disk to a device, one after the other."""

    def move(self, source: Weights, target: torch.Tensor) -> Move:
        """Begin a copy. What was launched before may still read ``target``."""
        ...


class ThreadMover(NotPicklable):
    """Copies by a thread, for a CPU whose steps have ended when their operators return.

    Args:
        bytes_per_s: of a link to simulate; None = as fast as memory is copied.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._bytes_per_s = bytes_per_s
        self._thread = ThreadPoolExecutor(1, "hpu-duo-weights")
        self._free_at = 0.0

    def move(self, source: Weights, target: torch.Tensor) -> Move:
        """Begin a copy."""
        return _ThreadMove(self._thread.submit(self._copy, source, target, time.monotonic()))

    def _copy(self, source: Weights, target: torch.Tensor, asked_at: float) -> None:
        if isinstance(source, InFile):
            source.read(target)
        else:
            target.copy_(source)
        if self._bytes_per_s is not None:
            self._free_at = max(self._free_at, asked_at) + source.nbytes / self._bytes_per_s
            time.sleep(max(0.0, self._free_at - time.monotonic()))


class _ThreadMove:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def hold(self) -> None:
        self._future.result()


class StreamMover(NotPicklable):
    """Copies by a queue of the device, beside its computation.

    Weights on a disk are read to one of two pinned buffers first, while the device computes what has been
    launched.

    Args:
        stream: the queue.
        pin: pins memory of the host, and returns what undoes that; see ``CopiesAside``.
    """

    def __init__(self, stream: CopyStream, pin: Callable[[torch.Tensor], Callable[[], None]]) -> None:
        self._stream, self.pin = stream, pin
        self._staged: list[tuple[torch.Tensor, Mark | None]] = []

    def stage(self, num_bytes: int) -> None:
        """Allocate the buffers that files are read to."""
        for _ in range(2):
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            weakref.finalize(self, self.pin(buffer))
            self._staged.append((buffer, None))

    def move(self, source: Weights, target: torch.Tensor) -> Move:
        """Begin a copy behind what the computation has launched."""
        if isinstance(source, InFile):
            buffer, mark = self._staged[0]
            if mark is not None:
                mark.wait()  # the copy that has read it last
            source.read(buffer[: source.nbytes])
            with self._stream.after_launched():
                target.copy_(buffer[: source.nbytes], non_blocking=True)
                move = _StreamMove(self._stream.mark())
            self._staged = [*self._staged[1:], (buffer, move.mark)]
            return move
        with self._stream.after_launched():
            target.copy_(source, non_blocking=True)
            return _StreamMove(self._stream.mark())


class _StreamMove:
    def __init__(self, mark: Mark) -> None:
        self.mark = mark

    def hold(self) -> None:
        self.mark.hold_computation()


def mover_for(runtime: DeviceRuntime, device: torch.device) -> Mover:
    """Return what copies to a device.

    Raises:
        ValueError: it has no queue of copies beside its computation.
    """
    if device.type == "cpu":
        return ThreadMover()
    if not isinstance(runtime, CopiesAside):
        raise ValueError(
            f"weights outside the device need a CPU or CUDA, whose copies run beside steps, got {device}"
        )
    return StreamMover(runtime.copy_stream(), runtime.pin)


def buffer_numbers(num_layers: int, num_ahead: int) -> list[int]:
    """Return the buffer of each layer.

    Of ``num_ahead + 1`` layers that follow each other no two share one, the first layers behind the last ones
    included. There are ``num_ahead + 1`` buffers where that divides the layers, and else the fewest above.
    """
    size = max(1, min(num_ahead + 1, num_layers))
    num_groups = num_layers // size
    numbers: list[int] = []
    for group in range(num_groups):
        longer = num_layers // num_groups + (group < num_layers % num_groups)
        numbers += range(longer)
    return numbers


def copied_layers(num_layers: int, num_ahead: int) -> list[bool]:
    """Return whether each layer is copied in each step; one with a buffer to itself stays there."""
    numbers = buffer_numbers(num_layers, num_ahead)
    return [numbers.count(number) > 1 for number in numbers]


@dataclass
class _Coming:
    """The layer that is copied to a buffer: its number, bytes whose copies have begun, and those copies."""

    number: int = -1
    begun: int = 0
    moves: list[Move] = field(default_factory=list)


class WeightStream(NotPicklable):
    """Matrices of some layers, which lie on the host or a disk and are copied before their layer runs.

    Each layer always has the same buffer, so its weights are the same tensors in every step, whose contents
    alternate. Vectors, such as norms and biases, stay on the device.

    Args:
        layers: those to stream, in their order in a step.
        device: of the buffers.
        mover: see the attribute.
        num_ahead: layers that are copied before they are needed.
        folder: for files of layers on a disk.
        on_disk: places of these in ``layers``; the others lie in memory of the host.

    Attributes:
        mover: copies to the device.
        num_parts: of a layer on the host, of which each call of a layer before begins one. As many as the
            groups of rows that call it let these load their contexts in between.
        num_bytes: of the weights on the host.
        disk_bytes: of those in files.
        buffer_bytes: of the buffers on the device.

    Raises:
        ValueError: a weight is in a layout of another library, which cannot be copied as bytes, or belongs to
            several layers; or the host has too little free memory.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        device: torch.device,
        mover: Mover,
        num_ahead: int = 1,
        folder: Path | None = None,
        on_disk: Collection[int] = (),
    ) -> None:
        self.mover, self._num_ahead, self._folder = mover, num_ahead, folder
        self.num_parts = 1
        weights = [list(streamed_weights(layer)) for layer in layers]
        every = [id(weight) for each in weights for weight in each]
        if len({*every}) < len(every):
            raise ValueError("expected offloaded layers with weights of their own, got shared ones")
        sizes = [sum(_room(weight) for weight in each) for each in weights]
        self.disk_bytes = sum(sizes[number] for number in on_disk)
        self.num_bytes = sum(sizes) - self.disk_bytes
        self._buffer_of = buffer_numbers(len(layers), num_ahead)
        staged = (
            max((sizes[number] for number in on_disk), default=0) if isinstance(mover, StreamMover) else 0
        )
        free, needed = host_memory().free, self.num_bytes + 2 * staged
        if needed > free:
            raise ValueError(
                f"expected offloaded weights within the free memory of the host, {free:,} bytes, got "
                f"{needed:,} bytes of weights"
            )
        memory = torch.empty(self.num_bytes, dtype=torch.uint8)
        if isinstance(mover, StreamMover):
            if self.num_bytes:
                weakref.finalize(self, mover.pin(memory))
            if staged:
                mover.stage(staged)
        on_host = iter(memory.split([size for number, size in enumerate(sizes) if number not in on_disk]))
        self._homes: list[Weights] = []
        num_buffers = max(self._buffer_of) + 1
        largest = [
            max(size for size, buffer in zip(sizes, self._buffer_of) if buffer == number)
            for number in range(num_buffers)
        ]
        self._on_device = [torch.zeros(size, dtype=torch.uint8, device=device) for size in largest]
        self.buffer_bytes = sum(largest)
        self._coming = [_Coming() for _ in range(num_buffers)]
        for place, (each, size, number) in enumerate(zip(weights, sizes, self._buffer_of)):
            home = torch.empty(size, dtype=torch.uint8) if place in on_disk else next(on_host)
            _rebind(each, home, self._on_device[number])
            if place in on_disk:
                assert folder is not None, "layers on a disk have a folder"
                self._homes.append(InFile(folder, home))
            else:
                self._homes.append(home)
        self._numbers = {id(layer): number for number, layer in enumerate(layers)}
        _streams[id(self)] = self

    def describe(self) -> str:
        """Return a note on what lies where."""
        num_files = sum(isinstance(home, InFile) for home in self._homes)
        disk = f", those of {num_files}, {self.disk_bytes / _GIB:,.3g} GiB, in files of {self._folder}"
        return (
            f"weights of {len(self._homes) - num_files} layers, {self.num_bytes / _GIB:,.3g} GiB, lie on the "
            f"host{disk if num_files else ''}; they pass through {len(self._on_device)} buffers, "
            f"{self.buffer_bytes / _GIB:,.3g} GiB of the device"
        )

    def arrival_of(self, layer: nn.Module) -> Callable[[], None] | None:
        """Return what brings the weights of a layer; None if they stay there.

        On a CPU it is one operator, which a list of a step's operators may have.
        """
        number = self._numbers.get(id(layer))
        if number is None:
            return None
        buffer = self._on_device[self._buffer_of[number]]
        if buffer.device.type != "cpu":  # layers are captured there, and what is between them is not
            return partial(self.arrive, number)
        return partial(_operator, buffer, id(self), number)

    def arrive(self, layer: int) -> None:
        """Begin copies of a layer and of parts of those behind it, and hold for the first.

        Computation of all layers before has been launched, so their buffers are free in its order.
        """
        num_layers = len(self._buffer_of)
        for ahead in range(min(self._num_ahead + 1, num_layers)):
            self._begin((layer + ahead) % num_layers, is_all=not ahead)
        coming = self._coming[self._buffer_of[layer]]
        if coming.moves:
            coming.number, moves = -1, coming.moves  # an interrupt from here on has another step copy again
            for each in moves:
                each.hold()
            coming.number, coming.moves = layer, []

    def _begin(self, number: int, *, is_all: bool) -> None:
        """Begin to copy all of a layer that is not on its way, or one part of it."""
        home, buffer = self._homes[number], self._buffer_of[number]
        coming, num_bytes = self._coming[buffer], home.nbytes
        if coming.number != number:
            coming.number, coming.begun, coming.moves = number, 0, []
        begin = coming.begun
        if begin == num_bytes:
            return
        target, end = self._on_device[buffer], num_bytes
        if isinstance(home, torch.Tensor) and not is_all:
            end = min(end, begin + -(-num_bytes // self.num_parts))
        part = home[begin:end] if isinstance(home, torch.Tensor) else home
        coming.moves.append(self.mover.move(part, target[begin:end]))
        coming.begun = end
        behind = self._homes[(number + 1) % len(self._homes)]
        if isinstance(behind, InFile):
            behind.expect()


def streamed_weights(layer: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors of a layer that are streamed: parameters and buffers of two dimensions or more.

    Raises:
        ValueError: one has no strides.
    """
    seen: set[int] = set()
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if tensor.dim() < 2 or id(tensor) in seen:
            continue
        if tensor.layout != torch.strided:
            raise ValueError(
                f"expected offloaded weights as rows or panels, got {name} in {tensor.layout}: "
                "pack_weights=False leaves them as rows"
            )
        seen.add(id(tensor))
        yield tensor


def weight_bytes(layer: nn.Module) -> int:
    """Bytes of a layer that are streamed."""
    return sum(map(_room, streamed_weights(layer)))


def choose_layers(layers: Sequence[nn.Module], num_bytes: float) -> list[nn.Module]:
    """Return layers with at least so many bytes of weights in all, spread evenly over the depth.

    Raises:
        ValueError: all layers together have fewer.
    """
    sizes = list(map(weight_bytes, layers))
    check_cpu_offload(num_bytes, sum(sizes))
    num_layers = len(layers)
    for count in range(1, num_layers + 1):
        numbers = [(2 * each + 1) * num_layers // (2 * count) for each in range(count)]
        if sum(sizes[number] for number in numbers) >= num_bytes:
            break
    return [layers[number] for number in numbers]


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _rebind(weights: Sequence[torch.Tensor], on_host: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy weights to the host, and let them be views of a buffer from now on."""
    begin = 0
    for weight in weights:
        end = begin + weight.nbytes
        shape, dtype = weight.shape, weight.dtype
        on_host[begin:end].view(dtype).view(shape).copy_(weight.detach())
        weight.data = buffer[begin:end].view(dtype).view(shape)
        begin += _room(weight)

"""Attention of one layer to blocks on the host, by either way, and the time of both."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from hpu_duo.device import runtime
from hpu_duo.engine.on_host.attention import (
    TILE_BYTES,
    HostAttention,
    _like,
)
from hpu_duo.engine.on_host.choice import HostContextSizes, HostRates
from hpu_duo.engine.on_host.crossing import Crossing, SameMemory, Streams, runs_of
from hpu_duo.engine.on_host.rows import HostContext, HostRow
from hpu_duo.engine.on_host.worker import Worker, WorkerThread
from kernels_ref import (
    Blocks,
    HeadGroup,
    Implementation,
    LayerSpec,
    NewKV,
    Partial,
    Scoring,
    Step,
    StepParts,
    StepTensors,
    merge,
    normalise,
    of_stores,
)
from kernels_ref.impl import kernels
from kernels_ref.partial import attend
from kernels_ref.step import PartInputs
from kernels_ref.unified import ElsewherePartials

pytestmark = pytest.mark.instruction_set


class FakeStreams:
    """A runtime whose streams run at once; counts what waits for a mark, on the device and on the host."""

    def __init__(self) -> None:
        self.num_pinned = self.num_holds = self.num_waits = self.num_open = 0

    def copy_stream(self) -> FakeStreams:
        return self

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        self.num_pinned += memory.nbytes
        return lambda: None

    def synchronize(self) -> None:
        """Everything has ended."""

    @contextmanager
    def after_launched(self) -> Iterator[None]:
        self.num_open += 1
        yield
        self.num_open -= 1

    def send(self, values: torch.Tensor) -> torch.Tensor:
        assert self.num_open
        return values.clone()

    fetch = send

    def mark(self) -> FakeStreams:
        assert self.num_open
        return self

    def hold_computation(self) -> None:
        assert not self.num_open
        self.num_holds += 1

    def wait(self) -> None:
        self.num_waits += 1


def crossing_on(device: str) -> Crossing:
    """Return streams of a GPU, streams on a CPU, or none, for a name."""
    if device == "cuda":
        return Streams(runtime.CudaRuntime(torch.device("cuda")))
    return SameMemory() if device == "cpu" else Streams(FakeStreams())  # type: ignore[arg-type]


class VirtualWorker:
    """Works on a clock: of the link, of the host, and of the device beside both.

    The device takes the fixed cost to hand work over.
    """

    def __init__(self, link: float, host: float, device: float, call: float = 0.0) -> None:
        self.now = self._host_now = 0.0
        self._link, self._host, self._device, self._call = link, host, device, call
        self._is_working = False

    def clock(self) -> float:
        """Time of the host in its work, else that of the device."""
        return self._host_now if self._is_working else self.now

    def begin(self, work: Callable[[], Any]) -> Callable[[], Any]:
        self.now += self._call
        self._host_now, self._is_working = max(self._host_now, self.now), True
        result, end, self._is_working = work(), self._host_now, False

        def join() -> Any:
            self.now = max(self.now, end)
            return result

        return join

    def move(self, num_bytes: int, copy: Callable[[], Any]) -> Any:
        self._host_now += num_bytes / self._link
        return copy()

    def host_reads(self, num_bytes: int) -> None:
        self._host_now += num_bytes / self._host

    def device_reads(self, num_bytes: int) -> None:
        self.now += num_bytes / self._device

    def drain(self) -> None:
        """Nothing runs on."""


class Layer:
    """A layer with a group of heads, whose first blocks have moved to the host, and a step of some rows.

    Args:
        rows: new tokens of each row, and its blocks on the host.
    """

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        worker: Worker,
        sizes: tuple[int, int, int, int],
        seed: int = 0,
        device: str = "cpu",
        crossing: Crossing | None = None,
    ) -> None:
        heads, group, dim, slots = sizes
        generator, total = torch.Generator().manual_seed(seed), sum(each for _, each in rows)
        k, v = (torch.randn(total + 1, heads, slots, dim, generator=generator) for _ in "kv")
        place = torch.device("cuda" if device == "cuda" else "cpu")
        self.k, self.v, units = k, v, of_stores(k.to(place), v.to(place))
        impl = Implementation.TRITON if device == "cuda" else Implementation.SDPA
        spec = LayerSpec((HeadGroup(heads, Blocks()),), group, dim, 1.0, None, impl)
        self.spec = spec
        self.attention = HostAttention([(units,)], [spec], total, worker, crossing or crossing_on(device))
        ids = torch.randperm(total, generator=generator).tolist()
        num_query, most = sum(num for num, _ in rows), max(num for num, _ in rows if num <= 2)
        self.q, first, found = torch.randn(num_query, heads, group, dim, generator=generator), 0, []
        self.blocks: list[list[int]] = []
        for number, (num_new, num_blocks) in enumerate(rows):
            mine, ids = ids[:num_blocks], ids[num_blocks:]
            found.append(HostRow(number, first, num_new, tuple(mine), num_new <= 2))
            self.blocks.append(mine)
            first += num_new
        copies = np.tile(np.arange(total, dtype=np.int32), (2, 1))
        self.rows, self.context = found, HostContext(copies, tuple(found), most)
        nothing = torch.zeros(0, dtype=torch.int32)
        tensors = StepTensors(*[nothing] * len(StepTensors._fields))._replace(
            positions=torch.zeros(num_query, dtype=torch.int32)
        )
        parts = StepParts(causal=True, shared=True, unique=True)
        self.step = Step(parts, tensors, most, torch.zeros(len(rows) * most), nothing, {})
        self.inputs = PartInputs(self.q.to(place), NewKV(nothing, nothing), units, tensors, Scoring())

    def attend(self) -> ElsewherePartials:
        """Begin the step, attend, and end it."""
        self.attention.begin(self.context)
        join = self.attention.begin_part((0, 0), kernels(self.spec.impl), self.inputs, self.step)
        assert join is not None
        partials = join()
        self.attention.end()
        return partials


@contextmanager
def without_waits(device: str) -> Iterator[None]:
    """Have operators that wait for a GPU raise an error."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("moves_decodes", [False, True])
@pytest.mark.parametrize("device", ["cpu", "streams", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_merged_triples_are_full_attention(moves_decodes: bool, device: str) -> None:
    rng = random.Random(1)
    for seed in range(20):
        sizes = (rng.choice((1, 2)), rng.choice((1, 2, 4)), rng.choice((8, 16)), rng.choice((4, 8)))
        rows = [(rng.choice((1, 1, 2, 5)), rng.randint(1, 9)) for _ in range(rng.randint(1, 4))] + [(1, 3)]
        layer = Layer(rows, WorkerThread(), sizes, seed, device)
        layer.attention.moves_decodes = moves_decodes
        if seed % 2:  # tiles of two blocks
            tile = layer.attention._tiles
            for key, units in tile.items():
                tile[key] = tuple(_like(each, 2, each.tensors[0].device) for each in units)
        with without_waits(device):
            of_tokens, of_rows = (
                None if found is None else Partial(*(each.to("cpu", non_blocking=True) for each in found))
                for found in layer.attend()
            )
        layer.attention._crossing.settle()
        for row, blocks in zip(layer.rows, layer.blocks):
            # What is on the device is one more block, which all rows see here.
            q = layer.q[row.first : row.first + row.num_new]
            one, both = (
                attend(
                    torch.einsum("qkgd,kbsd->qkgbs", q, layer.k[some].transpose(0, 1)).flatten(3),
                    None,
                    layer.v[some].transpose(0, 1).flatten(1, 2)[None, :],
                )
                for some in ([-1], [*blocks, -1])
            )
            if row.is_decode:
                assert of_rows is not None
                begin = row.ring_row * layer.step.decode_len
                there = Partial(*(each[begin : begin + row.num_new] for each in of_rows))
            else:
                assert of_tokens is not None
                there = Partial(*(each[row.first : row.first + row.num_new] for each in of_tokens))
            merged = normalise(merge(there, one), torch.float32)
            torch.testing.assert_close(merged, normalise(both, torch.float32), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("link", [8e9, 32e9])
def test_each_step_takes_the_faster_way_of_the_clock_by_the_formula(link: float) -> None:
    heads, group, dim, slots, num_rows, host, device = 2, 4, 64, 128, 2, 20e9, 400e9
    times, rates = [], HostRates(link, host, device)
    for moves_decodes in (False, True, None):
        worker = VirtualWorker(link, host, device)
        layer = Layer([(1, 16384 // slots)] * num_rows, worker, (heads, group, dim, slots))
        layer.attention.moves_decodes, layer.attention.rates = moves_decodes, rates
        layer.attend()
        times.append(worker.now)
    contexts = num_rows * 16384 * heads * 2 * dim * 4
    sizes = HostContextSizes.of(num_rows, heads * group, dim, contexts, contexts // TILE_BYTES, dtype_bytes=4)
    nothing = HostContextSizes.of(num_rows, heads * group, dim, 0, 0)
    assert nothing.moved(rates) == 0 < nothing.attended(rates)
    assert layer.attention.traffic.contexts == (contexts if link > host else 0)
    assert times[0] == pytest.approx(sizes.attended(rates), rel=0.01)
    assert times[1] == pytest.approx(sizes.moved(rates), rel=0.01)
    assert times[2] == times[link > host] == min(times)


@pytest.mark.parametrize(
    ("num_rows", "decode_len", "host_rate", "moves"),
    [(1, 1, 1.5e9, True), (96, 1, 1.5e9, False), (1, 1, 2e9, False), (1, 64, 2e9, True)],
    ids=["one-row", "a-tile-for-each-row", "one-token", "many-tokens"],
)
def test_choice_counts_tiles_of_rows_and_tokens_of_decodes(
    num_rows: int, decode_len: int, host_rate: float, moves: bool
) -> None:
    """Each step takes the way that is faster by the clock; all have as many blocks."""
    worker = VirtualWorker(2e9, host_rate, 40e9, 5e-5)
    layer = Layer([(1, 96 // num_rows)] * num_rows, worker, (1, 16, 16, 128))
    layer.attention.measure([layer.spec], worker.clock)
    layer.step = layer.step._replace(
        decode_len=decode_len, row_token=torch.zeros(num_rows * decode_len, dtype=torch.int32)
    )
    layer.context = layer.context._replace(decode_len=decode_len)
    times = []
    for way in (False, True, None):
        layer.attention.moves_decodes, began = way, worker.now
        layer.attend()
        times.append(worker.now - began)
    assert times[2] == pytest.approx(times[moves], rel=1e-6)
    assert times[moves] < times[not moves]


def test_measured_rates_are_those_of_the_clock() -> None:
    rates = 8e9, 20e9, 12e9, 5e-5
    worker = VirtualWorker(*rates)
    layer = Layer([(1, 96)], worker, (2, 4, 64, 128))
    layer.attention.measure([layer.spec], worker.clock)
    assert layer.attention.rates is not None
    assert layer.attention.rates[:4] == pytest.approx(rates, rel=1e-6)
    assert layer.attention.worker is worker
    assert layer.attention.traffic.contexts == 0


class Gpu(FakeStreams):
    """A device behind its host, on a clock: streams of copies, and computation that the host launches.

    Also the worker, whose thread works at once.

    Args:
        launch: seconds in which the host launches the work of a tile.
    """

    def __init__(self, link: float, host: float, device: float, launch: float) -> None:
        super().__init__()
        self.now = self.link_now = self.device_now = 0.0
        self._link, self._host, self._device, self._launch = link, host, device, launch

    def clock(self) -> float:
        return self.now

    def synchronize(self) -> None:
        self.now = max(self.now, self.link_now, self.device_now)

    @contextmanager
    def after_launched(self) -> Iterator[None]:
        self.link_now = max(self.link_now, self.now, self.device_now)
        with super().after_launched():
            yield

    def hold_computation(self) -> None:
        self.device_now = max(self.device_now, self.link_now)

    def begin(self, work: Callable[[], Any]) -> Callable[[], Any]:
        result = work()
        return lambda: result

    def move(self, num_bytes: int, copy: Callable[[], Any]) -> Any:
        self.link_now += num_bytes / self._link
        return copy()

    def host_reads(self, num_bytes: int) -> None:
        self.now = max(self.now, self.link_now) + num_bytes / self._host

    def device_reads(self, num_bytes: int) -> None:
        self.now += self._launch
        self.device_now = max(self.device_now, self.now) + num_bytes / self._device

    def drain(self) -> None:
        """Nothing runs on."""


@pytest.mark.parametrize("rates", [(50e9, 1e12), (50e9, 20e9), (1e12, 1e12)], ids=["link", "device", "host"])
def test_moving_to_a_device_behind_its_host_takes_the_predicted_time(
    rates: tuple[float, float],
) -> None:
    """Launches run beside copies and attention, whichever of the three takes longest."""
    link, device = rates
    gpu, heads, slots, dim, num_tile = Gpu(link, 100e9, device, 3e-4), 2, 128, 64, 32
    layer = Layer([(1, 160)] * 2, gpu, (heads, 4, dim, slots), crossing=Streams(gpu))  # type: ignore[arg-type]
    unit = heads * slots * dim * 2 * 4
    for key, units in layer.attention._tiles.items():
        layer.attention._tiles[key] = tuple(_like(each, num_tile, each.tensors[0].device) for each in units)
    layer.attention.measure([layer.spec], gpu.clock)
    found, sizes = layer.attention.rates, HostContextSizes(320 * unit, 0.0, 0.0, 10)
    assert found is not None
    gpu.synchronize()
    layer.attention.moves_decodes, began = True, gpu.now
    layer.attend()
    gpu.synchronize()
    assert sizes.moved(found) == pytest.approx(gpu.now - began, rel=0.1)
    assert found.host == pytest.approx(100e9, rel=0.01)


def test_neighbouring_blocks_are_one_copy() -> None:
    assert runs_of([4, 5, 6, 2, 3, 0], [0, 1, 2, 3, 4, 5]) == [(4, 0, 3), (2, 3, 2), (0, 5, 1)]
    assert runs_of([1, 2], [7, 9]) == [(1, 7, 1), (2, 9, 1)]


class SlowDevice(WorkerThread):
    """A thread, beside a device that attends to 1 GB/s."""

    def device_reads(self, num_bytes: int) -> None:
        time.sleep(num_bytes / 1e9)


@pytest.mark.parametrize(("worker", "most"), [(WorkerThread(4e8), 4e8), (SlowDevice(1.2e9), 1e9)])
def test_a_measured_link_and_device_are_no_faster_than_they_are(worker: WorkerThread, most: float) -> None:
    """With the thread and the clock that engines have: the next tile arrives while the device attends."""
    layer = Layer([(1, 256)], worker, (2, 1, 64, 128))
    layer.attention.measure([layer.spec])
    rates = layer.attention.rates
    assert rates is not None
    assert 0 < (rates.device if isinstance(worker, SlowDevice) else rates.link) <= most

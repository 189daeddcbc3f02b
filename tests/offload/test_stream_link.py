"""Transfers by streams of a device: on a CUDA device, and on streams whose ends a test decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from graphs import BatchShape, EagerBackend
from graphs.backends.compile import CompileBackend
from hpu_duo import HPUDuoModel
from hpu_duo.config.engine import EngineConfig
from hpu_duo.device.streams import Mark
from hpu_duo.kv.row_state import Units
from hpu_duo.kv.store import block_units, row_units
from hpu_duo.kv.tiers.host_link import RECORD_ORDER, HostLink
from hpu_duo.kv.tiers.link import DamagedRecord, Landed, Link, Transfer, Transfers
from hpu_duo.kv.tiers.policy import LoadPolicy
from hpu_duo.kv.tiers.staged_link import StagedLink
from hpu_duo.kv.tiers.stream_link import StreamLink
from hpu_duo.startup import device_side
from hpu_duo.startup.offloading import link_bytes
from tests.engine.tiny import Tiny
from tests.modeling.families import BLOCK
from tests.offload.test_offloading import DUO, HOST, KINDS, SMALL, answers


@dataclass
class FakeMark:
    """A mark that is passed after some looks."""

    looks: int

    @property
    def is_passed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def seconds_since(self, earlier: Mark) -> float:
        return 1e-3

    def hold_computation(self) -> None:
        """Copies have run when they return."""

    def wait(self) -> None:
        raise AssertionError("expected no step to wait on the host")


@dataclass
class FakeStreams:
    """A runtime and its streams: copies run at once, and end after some looks at their marks."""

    looks: int = 3
    num_pinned: int = 0
    is_queueing: bool = field(default=False, init=False)

    def copy_stream(self) -> FakeStreams:
        return self

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        self.num_pinned += memory.nbytes

        def unpin() -> None:
            self.num_pinned -= memory.nbytes

        return unpin

    @contextmanager
    def after_launched(self) -> Iterator[None]:
        self.is_queueing = True
        yield
        self.is_queueing = False

    def send(self, values: torch.Tensor) -> torch.Tensor:
        assert self.is_queueing
        return values

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        assert self.is_queueing
        return values.clone()

    def mark(self) -> FakeMark:
        assert self.is_queueing
        return FakeMark(self.looks)


@pytest.fixture(autouse=True)
def load_whatever_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """This model computes a block faster than a link copies one."""
    monkeypatch.setattr(LoadPolicy, "loads", lambda *_: True)


def take(served: HPUDuoModel, link: Callable[[HostLink], Link]) -> HPUDuoModel:
    executor, tiers = served.engine.runner.executor, served.engine.scheduler.allocations.tiers
    assert tiers is not None
    assert isinstance(executor.link, HostLink)
    executor.link = tiers.stage.link = link(executor.link)
    return served


def test_texts_come_back_by_streams_that_end_later(tiny: Tiny) -> None:
    """Records of blocks of codes and of rings, in buffers of two blocks; a snapshot fills several slots."""
    plain, tiered = (tiny.load(**sizes, **KINDS["codes"], device="cpu") for sizes in (SMALL, HOST))
    store, streams = tiered.engine.runner.store, FakeStreams()

    def by_streams(threads: HostLink) -> StreamLink:
        return StreamLink(block_units(store), row_units(store), *threads.slots.shape, streams, 2)

    take(tiered, by_streams)
    assert streams.num_pinned > 0
    assert answers(tiered, 3) == answers(plain, 3)
    tiers = tiered.engine.scheduler.allocations.tiers
    assert tiers is not None
    assert tiers.counters.num_loaded > 0
    assert tiers.counters.num_hit_tokens > 5 * BLOCK
    assert tiers.counters.loaded_s > 0


def test_the_bytes_of_a_links_buffers_are_known_before(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one with threads as its engine plans them, and of one with streams."""
    planned = []

    def note(*given: Any) -> int:
        planned.append(link_bytes(*given))
        return planned[-1]

    monkeypatch.setattr(device_side, "link_bytes", note)
    executor = tiny.load(**HOST, **DUO, kv_offloading_blocks_per_step=2, device="cpu").engine.runner.executor
    assert isinstance(executor.link, HostLink)
    assert planned == [executor.link.staging.nbytes]
    store, streams = executor.store, FakeStreams()
    link = StreamLink(block_units(store), row_units(store), 2, 512, streams, 3)
    config = EngineConfig.of(kv_offloading_size=1.0, kv_offloading_blocks_per_step=3)
    assert link_bytes(config, store.plan, streams, 64) == link.staging.nbytes > 0  # type: ignore[arg-type]
    without = config.override(kv_offloading_size=None, kv_offloading_blocks_per_step=None)
    assert link_bytes(without, store.plan, streams, 64) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("num_bytes", [3, 4])
def test_numbers_come_back_whether_they_are_aligned_in_a_record(num_bytes: int) -> None:
    stores = [
        torch.arange(4 * num_bytes, dtype=torch.uint8).view(4, num_bytes),
        torch.arange(4 * 2, dtype=torch.float32).view(4, 2),
        torch.arange(4, dtype=torch.int32),
    ]
    link = StreamLink((), [Units(store) for store in stores], 3, 8, FakeStreams(looks=0))
    expected = [store.clone() for store in stores]
    rows = (Transfer(is_row=True, unit=2, slots=(0, 2)),)
    link.begin(Transfers(stores=rows))
    for store in stores:
        store[2] = 0
    link.begin(Transfers(loads=rows))
    assert all(torch.equal(store, wanted) for store, wanted in zip(stores, expected))


class WaitedMark(FakeMark):
    """One that the host may wait for."""

    def wait(self) -> None:
        self.looks = 0


class FakeStagedStreams(FakeStreams):
    """A runtime of a device that copies from and to pinned buffers, which are not the records."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)


class FakeBuffers(FakeStagedStreams):
    """One whose marks may be waited for."""

    def mark(self) -> FakeMark:
        return WaitedMark(self.looks)


FIVE = tuple(Transfer(is_row=False, unit=unit, slots=(unit + 1, unit + 8)) for unit in range(5))
"""Blocks of 10 bytes, in two slots of 8."""
SHAPE = BatchShape.parse("csu/q8/s0/u0/l1")


@pytest.mark.parametrize("kind", ["codes", "budget"])
def test_texts_come_back_by_compiled_graphs_and_pinned_buffers(tiny: Tiny, kind: str) -> None:
    """Records of several dtypes, two blocks or one row at a time."""
    plain, tiered = (tiny.load(**sizes, **KINDS[kind], device="cpu") for sizes in (SMALL, HOST))
    store, backend = tiered.engine.runner.store, CompileBackend("eager", guards=True)

    def by_graphs(threads: HostLink) -> StagedLink:
        sizes = threads.slots.shape
        return StagedLink(block_units(store), row_units(store), *sizes, FakeBuffers(), 2, backend, SHAPE)

    take(tiered, by_graphs)
    assert answers(tiered, 3) == answers(plain, 3)
    tiers = tiered.engine.scheduler.allocations.tiers
    assert tiers is not None
    assert tiers.counters.num_loaded > 0
    assert len(backend.keys) == 2 * (bool(block_units(store)) + bool(row_units(store)))


def test_transfers_wait_for_a_free_buffer_of_two() -> None:
    """Five blocks, two at a time."""
    store, numbers = torch.arange(7 * 3, dtype=torch.bfloat16).view(7, 3), torch.arange(7, dtype=torch.int32)
    link = graphs_link(store, numbers, FakeBuffers(1))
    expected = store.clone(), numbers.clone()
    link.begin(Transfers(stores=FIVE))
    assert [each.transfer for each in landed(link)] == [*FIVE]
    store[:5] = numbers[:5] = 0
    link.begin(Transfers(loads=FIVE))
    assert [each.transfer for each in landed(link)] == [*FIVE]
    # Padding is in the null unit.
    assert all(torch.equal(one[:-1], other[:-1]) for one, other in zip((store, numbers), expected))
    link.begin(Transfers(stores=FIVE))
    link.drain()
    assert link.poll() == []


@pytest.mark.parametrize("kind", ["threads", "streams", "graphs"])
def test_a_record_that_changes_on_the_host_is_found_when_it_is_loaded(kind: str) -> None:
    """Rank 0 learns which; on another rank the step that waits for it fails, or one behind it."""
    store, numbers = torch.arange(7 * 3, dtype=torch.bfloat16).view(7, 3), torch.arange(7, dtype=torch.int32)
    units = [Units(store), Units(numbers)]
    link: Any = {
        "threads": lambda: HostLink(units, (), 16, 8, 2),
        "streams": lambda: StreamLink(units, (), 16, 8, FakeStreams(0), 2),
        "graphs": lambda: graphs_link(store, numbers, FakeBuffers(0)),
    }[kind]()
    link.begin(Transfers(stores=FIVE))
    assert not any(each.is_damaged for each in landed(link))
    link.slots[FIVE[3].slots[1], 1] ^= 1
    link.begin(Transfers(loads=FIVE))
    assert {each.transfer for each in landed(link) if each.is_damaged} == {FIVE[3]}
    link.begin(Transfers(loads=FIVE[:1]))
    link.wait(FIVE[:1])
    link.begin(Transfers(loads=FIVE[3:4]))
    waits = [lambda: link.wait(FIVE[3:4]), lambda: link.begin(Transfers())]
    with pytest.raises(DamagedRecord, match="does not have its checksum"):
        _ = [wait() for wait in waits]


def test_a_rank_that_is_behind_waits_on_its_device() -> None:
    """Of what has landed on rank 0, loads hold the computation; records that a load needs are finished."""
    store, numbers = torch.arange(7 * 3, dtype=torch.bfloat16).view(7, 3), torch.arange(7, dtype=torch.int32)
    link = graphs_link(store, numbers, FakeStagedStreams(10**9))
    two = FIVE[:2]
    link.begin(Transfers(stores=two))
    link.wait(two)
    store[:2] = numbers[:2] = 9
    with pytest.raises(AssertionError, match="to wait on the host"):
        link.begin(Transfers(loads=two))  # its records are not here yet
    streams = FakeBuffers(10**9)
    link = graphs_link(store, numbers, streams)
    link.begin(Transfers(stores=two))
    link.wait(two)
    store[:2] = numbers[:2] = 0
    link.begin(Transfers(loads=two))
    assert (store[:2] == 0).all()
    link.wait(two)
    assert (store[:2] == 9).all()
    assert (numbers[:2] == 9).all()
    assert link.poll() == []


@pytest.mark.parametrize("move", ["_to_slots", "_from_slots"])
def test_a_rank_that_is_behind_fails_where_it_waits(monkeypatch: pytest.MonkeyPatch, move: str) -> None:
    """Not of what rank 0 has dropped; the buffers are free, and the next transfers are right."""
    store, numbers = torch.arange(7 * 3, dtype=torch.bfloat16).view(7, 3), torch.arange(7, dtype=torch.int32)
    link, expected = graphs_link(store, numbers, FakeBuffers(0)), store.clone()
    is_load, two = move == "_from_slots", FIVE[:2]
    transfers = Transfers(loads=two) if is_load else Transfers(stores=two)

    def broken(*_: object) -> None:
        raise OSError("no such memory")

    def fail() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(link, move, broken)
            link.begin(transfers)
            link.wait_any()

    fail()
    link.wait(())
    with pytest.raises(OSError, match="no such memory"):
        link.wait(two)
    fail()
    link.begin(Transfers(stores=two))
    while any(lane.flying for lane in link._lanes.values()):
        link.wait_any()
    store[:2] = 0
    link.begin(Transfers(loads=two))
    link.wait(two)
    assert torch.equal(store, expected)
    link.drain()
    assert all(len(lane.free) == len(lane.buffers) for lane in link._lanes.values())


@pytest.mark.parametrize("is_load", [False, True])
def test_what_fails_behind_a_wait_ends_a_later_step(monkeypatch: pytest.MonkeyPatch, is_load: bool) -> None:
    """A load ends the step that waits for it, and a store one behind it: another rank has its record."""
    store, numbers = torch.zeros(7, 3, dtype=torch.bfloat16), torch.zeros(7, dtype=torch.int32)
    link, two, is_open = graphs_link(store, numbers, FakeBuffers(0)), FIVE[:2], Event()

    def broken(*_: object) -> None:
        is_open.wait()
        raise OSError("no such memory")

    for move in ("_to_slots", "_from_slots"):
        monkeypatch.setattr(link, move, broken)
    link.begin(Transfers(loads=two) if is_load else Transfers(stores=two))
    if is_load:
        is_open.set()
    else:
        link.wait(two)
        is_open.set()
    with pytest.raises(OSError, match="no such memory"):
        link.wait(two) if is_load else link.begin(Transfers(loads=two))
    assert link.poll() == []


def graphs_link(store: torch.Tensor, numbers: torch.Tensor, streams: FakeStagedStreams) -> StagedLink:
    link = StagedLink([Units(store), Units(numbers)], (), 16, 8, streams, 2, EagerBackend(), SHAPE)
    link.warm_up()
    return link


def landed(link: Link) -> list[Landed]:
    found = list[Landed]()
    while len(found) < len(FIVE):
        link.wait_any()
        found += link.poll()
    return found


def test_an_error_of_a_transfer_is_raised_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of 2-byte numbers beside rows of 21 bytes, whose buffers are apart by whole numbers."""
    blocks, rows = torch.zeros(4, 3, dtype=torch.bfloat16), torch.zeros(4, 21, dtype=torch.uint8)
    link = StreamLink([Units(blocks)], [Units(rows)], 8, 8, FakeStreams(looks=0), 3)

    def broken(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(link, "_load", broken)
    link.begin(Transfers(loads=(block := Transfer(is_row=False, unit=0, slots=(1,)),)))
    with pytest.raises(MemoryError, match="no room"):
        link.wait([block])


def test_tensors_of_a_record_are_in_the_order_that_the_fingerprint_has() -> None:
    """Another order needs another ``RECORD_ORDER``: folders of disks have records of earlier programs."""
    codes, scales = torch.full((3, 4), 7, dtype=torch.uint8), torch.ones(3, 1)
    link = HostLink([Units(codes), Units(scales)], (), 2, 8, 2)
    link.begin(Transfers(stores=(stored := Transfer(is_row=False, unit=1, slots=(0,)),)))
    link.wait([stored])
    assert (link.slots[0, :4].view(np.float32) == 1).all()
    assert (link.slots[0, 4:] == 7).all()
    assert RECORD_ORDER == "widest numbers first"


def test_a_link_that_is_gone_leaves_no_memory_pinned(tiny: Tiny) -> None:
    store, streams = tiny.load(**SMALL, **DUO, device="cpu").engine.runner.store, FakeStreams(looks=0)
    link = StreamLink(block_units(store), row_units(store), 2, 512, streams)
    link.begin(Transfers(stores=(block := Transfer(is_row=False, unit=0, slots=(1,)),)))
    link.wait_any()
    assert [each.transfer for each in link.poll()] == [block]
    del link
    assert streams.num_pinned == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_texts_come_back_on_cuda_and_no_transfer_waits(
    tiny: Tiny, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {**KINDS[kind], "device": "cuda", "dtype": "float32"}
    begin, num = StreamLink.begin, 0

    def begin_without_waiting(link: StreamLink, transfers: Transfers) -> None:
        nonlocal num
        num += len(transfers.loads)
        torch.cuda.set_sync_debug_mode("error")
        try:
            begin(link, transfers)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(StreamLink, "begin", begin_without_waiting)
    assert answers(tiny.load(**HOST, **options), 3) == answers(tiny.load(**SMALL, **options), 3)
    assert num > 0

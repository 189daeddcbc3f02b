"""The prefix cache's tier in host memory: how fast a long context leaves, and comes back.

Links move the records of a context block by block, as the engine lets them: so many a step, queued at once.
A step that computes nothing has no time of its own, so that the link alone is measured.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu_suite.clock import Clock, Timing
from benchmarks.gpu_suite.results import Key, Point, Results
from benchmarks.gpu_suite.shapes import ModelShape, Sizes
from hpu_duo.device import runtime_for
from hpu_duo.device.streams import CopiesAside
from hpu_duo.kv.row_state import Units
from hpu_duo.kv.tiers.host_link import HostLink
from hpu_duo.kv.tiers.link import Transfer, Transfers
from hpu_duo.kv.tiers.stream_link import StreamLink
from kernels_ref import UnitLayout

SECTION = "offload"
UP, DOWN = "to the host", "from the host"
COPY = "one copy"
PER_STEP = 32
"""Blocks of a step, each way."""


def measure_host_tier(clock: Clock, sizes: Sizes, dtype: torch.dtype, results: Results) -> None:
    """Time large copies each way, then all blocks of a long context, which must come back unchanged."""
    model = sizes.models[-1]
    case = f"{model.name}, {sizes.offload_context} tokens"
    if all(results.is_measured(Key(SECTION, each, way)) for each in (COPY, case) for way in (UP, DOWN)):
        return
    for way, timing in _copies(clock, sizes).items():
        values = {**timing.values(), "bytes": sizes.copied_bytes}
        results.add(Point(Key(SECTION, COPY, way), values))
    for way, moved in _context(clock, model, sizes, dtype).items():
        results.add(Point(Key(SECTION, case, way), moved))


def rate(point: Point) -> float:
    """Bytes a second."""
    return point.values["bytes"] / point.values["median_s"]


def _copies(clock: Clock, sizes: Sizes) -> dict[str, Timing]:
    on_device = torch.ones(sizes.copied_bytes, dtype=torch.uint8, device=clock.device)
    on_host = torch.ones(sizes.copied_bytes, dtype=torch.uint8, pin_memory=clock.device.type == "cuda")
    return {
        UP: clock.time(lambda: on_host.copy_(on_device, non_blocking=True)),
        DOWN: clock.time(lambda: on_device.copy_(on_host, non_blocking=True)),
    }


@dataclass(frozen=True)
class _Moved:
    """All blocks of a context in one direction: wall seconds, and those in which the host queued copies."""

    seconds: float
    queueing_s: float


def _context(
    clock: Clock, model: ModelShape, sizes: Sizes, dtype: torch.dtype
) -> dict[str, dict[str, float]]:
    num_blocks = -(-sizes.offload_context // sizes.block_size)
    layout = UnitLayout.dense(num_blocks + 1, model.num_kv_heads, sizes.block_size)
    shape = (layout.num_units * layout.unit_stride, model.head_dim)
    stores = [torch.empty(shape, dtype=dtype, device=clock.device) for _ in range(2 * model.num_layers)]
    for number, store in enumerate(stores):
        store.normal_(generator=torch.Generator(clock.device).manual_seed(number))
    units = [Units(store, layout) for store in stores]
    record = sum(math.prod(each.shape) * dtype.itemsize for each in units)
    runtime = runtime_for(clock.device)
    link: StreamLink | HostLink
    if isinstance(runtime, CopiesAside):
        link = StreamLink(units, (), num_blocks, record, runtime, PER_STEP)
    else:
        link = HostLink(units, (), num_blocks, record, PER_STEP)
    blocks = [Transfer(is_row=False, unit=number, slots=(number,)) for number in range(num_blocks)]
    found: dict[str, list[_Moved]] = {UP: [], DOWN: []}
    expected = [store[: layout.unit_stride].clone() for store in stores]
    for _ in range(min(3, clock.rounds)):
        found[UP].append(_move(clock, link, blocks, is_load=False))
        for store in stores:
            store.zero_()
        found[DOWN].append(_move(clock, link, blocks, is_load=True))
    if not all(torch.equal(store[: len(first)], first) for store, first in zip(stores, expected)):
        raise ValueError("expected blocks to come back from the host as they left, got other bytes")
    link.drain()
    return {
        way: {
            **Timing.of([each.seconds for each in moved]).values(),
            "bytes": float(num_blocks * record),
            "queueing_s": statistics.median(each.queueing_s for each in moved),
            "steps": float(-(-num_blocks // PER_STEP)),
        }
        for way, moved in found.items()
    }


def _move(clock: Clock, link: StreamLink | HostLink, blocks: Sequence[Transfer], *, is_load: bool) -> _Moved:
    """Move blocks, two steps' transfers on their way at most, as reserved units allow."""
    clock.wait()
    began, queueing, flying = time.perf_counter(), 0.0, 0
    for start in range(0, len(blocks), PER_STEP):
        while flying > PER_STEP:
            link.wait_any()
            flying -= len(link.poll())
        batch = tuple(blocks[start : start + PER_STEP])
        before = time.perf_counter()
        link.begin(Transfers(loads=batch) if is_load else Transfers(stores=batch))
        queueing += time.perf_counter() - before
        flying += len(batch)
    while flying:
        link.wait_any()
        flying -= len(link.poll())
    clock.wait()
    return _Moved(time.perf_counter() - began, queueing)

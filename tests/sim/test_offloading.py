"""A tier in host memory beside the simulated HPU: nothing new is compiled after warm-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphs import BucketTable
from hpu_duo import HPUDuoModel
from hpu_duo.kv.tiers.policy import LoadPolicy
from hpu_duo.kv.tiers.staged_link import StagedLink
from hpu_duo.lab import sim
from hpu_duo.lab.sim.streams import SimCopyStream
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup import device_side
from hpu_duo.startup.offloading import link_bytes
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.modeling.families import BLOCK, prompts_of
from tests.tiers import further

pytestmark = pytest.mark.usefixtures("simulated_hpu", "default_buckets")

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
TEXTS = prompts_of([3 * BLOCK + extra for extra in range(6)], seed=9)


OPTIONS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "max_model_len": 32,
    "pattern": PATTERN,
}
CACHE: dict[str, Any] = {
    "num_blocks": 16,
    "num_prefix_snapshots": 3,
    "kv_offloading_size": 0.01,
    "kv_offloading_blocks_per_step": 2,
}
TABLE = BucketTable.from_strings(["csu/q8/s8/u16/l2"])


def on_cpu(tiny: Tiny, **options: Any) -> HPUDuoModel:
    """Load it where nothing is offloaded."""
    options = {"enable_prefix_caching": False, "num_blocks": 24, **OPTIONS, **options}
    return tiny.load(device="cpu", **options)


def test_transfers_need_nothing_new_after_warm_up(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadPolicy, "loads", lambda *_: True)
    expected = tokens_of(serve(on_cpu(tiny), TEXTS * 2, GREEDY))
    planned = []

    def note_plan(*given: Any) -> int:
        planned.append(link_bytes(*given))
        return planned[-1]

    monkeypatch.setattr(device_side, "link_bytes", note_plan)
    served = tiny.load(device="hpu-sim", buckets=TABLE, **CACHE, **OPTIONS)
    link = served.engine.runner.executor.link
    assert isinstance(link, StagedLink)
    buffers = [buffer for lane in link._lanes.values() for buffer in lane.buffers]
    assert len(buffers) == 2 * 2 * 2
    allocated = sum(each.nbytes for buffer in buffers for each in (buffer.ids, *buffer.data))
    assert allocated == link.sizes.buffer_bytes
    assert planned == [allocated + link.sizes.working_bytes]
    served.warmup()
    shapes = {True: set[torch.Size](), False: set[torch.Size]()}
    queue = SimCopyStream.queue

    def note(stream: SimCopyStream, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.ndim > 1:  # ids are a vector
            shapes[stream is link._streams[True]].add(source.shape)
        queue(stream, name, target, source)

    monkeypatch.setattr(SimCopyStream, "queue", note)
    with sim.watch() as seen:
        assert tokens_of(serve(served, TEXTS * 2, GREEDY)) == expected
    offload = served.stats().offload
    assert offload is not None
    assert offload.num_loaded > 0
    report = seen.report()
    assert (report.new_graphs, report.new_recipes) == (0, 0)
    assert not report.excused
    # Blocks, two at a time, and rows.
    assert [len(found) for found in shapes.values()] == [2, 2]
    assert {size for found in shapes.values() for size, _ in found} == {1, 2}
    # A step reads its results only, and nothing is read between steps.
    assert report.max_reads == 1
    assert report.between.d2h_reads == 0
    # Its message, and the ids of blocks and of rows that leave.
    assert max(step.h2d_copies for step in report.steps) <= 1 + 2
    assert sum(step.aside_copies for step in report.steps) > 0


def fail_once(served: HPUDuoModel, move: str, number: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a call that copies to or from slots fail; returns the calls, which grow.

    Where requests are swapped, only calls count while one is.
    """
    link, calls = served.engine.runner.executor.link, list[int]()
    tiers = served.engine.scheduler.allocations.tiers
    assert tiers is not None
    swap = tiers.swap
    copy = getattr(link, move)

    def fail(*given: Any) -> Any:
        if swap is None or len(swap):
            calls.append(len(calls))
            if len(calls) == number:
                raise OSError("no such memory")
        return copy(*given)

    monkeypatch.setattr(link, move, fail)
    return calls


def assert_nothing_is_in_use(served: HPUDuoModel) -> None:
    """Once all has landed, buffers of the link are free, and reserved units too or they wait for a step."""
    tiers, link = served.engine.scheduler.allocations.tiers, served.engine.runner.executor.link
    assert tiers is not None
    assert isinstance(link, StagedLink)
    while tiers.settle():
        pass
    assert all(len(lane.free) == len(lane.buffers) for lane in link._lanes.values())
    stage, kinds = tiers.stage, (False, True)
    free = sum(stage.num_free(is_load=is_load, is_row=is_row) for is_load in kinds for is_row in kinds)
    assert free + stage.num_open == sum(stage.num_units(is_row=is_row) for is_row in kinds)
    assert tiers.swap is None or tiers.swap.num_used_slots == 0


# Which call fails decides whether a poll or the wait before a step meets the error first.
@pytest.mark.parametrize(
    ("move", "number"),
    [
        ("_from_slots", 1),
        pytest.param("_to_slots", 3, marks=pytest.mark.slow),
        *further(("_from_slots", 3)),
    ],
)
def test_a_transfer_that_fails_ends_no_request(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, move: str, number: int
) -> None:
    monkeypatch.setattr(LoadPolicy, "loads", lambda *_: True)
    cache = {**CACHE, "num_prefix_snapshots": 6}
    cold, served = on_cpu(tiny), tiny.load(device="hpu-sim", buckets=TABLE, **cache, **OPTIONS)
    calls = fail_once(served, move, number, monkeypatch)
    found = [tokens_of(serve(served, [text], GREEDY))[0] for text in TEXTS * 2]
    assert found == tokens_of(serve(cold, TEXTS * 2, GREEDY))
    assert_nothing_is_in_use(served)
    assert len(calls) > number
    assert "failed, so records are dropped: OSError('no such memory')" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("move", ["_to_slots", *further("_from_slots")])
def test_a_transfer_that_fails_computes_swapped_requests_again(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, move: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    texts = TEXTS[:3]
    expected = tokens_of(serve(on_cpu(tiny, max_model_len=80), texts, params))
    swap = {**OPTIONS, **CACHE, "max_model_len": 80, "preemption_mode": "swap", "swap_space": 0.01}
    served = tiny.load(device="hpu-sim", buckets=TABLE, **swap)
    fail_once(served, move, 1, monkeypatch)
    assert tokens_of(serve(served, texts, params)) == expected
    assert_nothing_is_in_use(served)
    offload = served.stats().offload
    assert offload is not None
    assert offload.swap is not None
    assert offload.swap.num_lost > 0

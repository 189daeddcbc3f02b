"""A tier in host memory beside the simulated HPU: nothing new is compiled after warm-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphs import BucketTable
from hpu_duo.kv.tiers.policy import LoadPolicy
from hpu_duo.kv.tiers.staged_link import StagedLink
from hpu_duo.lab import sim
from hpu_duo.lab.sim.streams import SimCopyStream
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup import device_side
from hpu_duo.startup.offloading import link_bytes
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.modeling.families import BLOCK, prompts_of

pytestmark = pytest.mark.usefixtures("simulated_hpu", "default_buckets")

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
TEXTS = prompts_of([3 * BLOCK + extra for extra in range(6)], seed=9)


def test_transfers_need_nothing_new_after_warm_up(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadPolicy, "loads", lambda *_: True)
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 32, "pattern": PATTERN}
    table = BucketTable.from_strings(["csu/q8/s8/u16/l2"])
    cold = tiny.load(device="cpu", enable_prefix_caching=False, num_blocks=12, **options)
    expected = tokens_of(serve(cold, TEXTS * 2, GREEDY))
    cache = {"num_blocks": 16, "num_prefix_snapshots": 3, "kv_offloading_size": 0.01}
    cache["kv_offloading_blocks_per_step"] = 2
    planned = []

    def note_plan(*given: Any) -> int:
        planned.append(link_bytes(*given))
        return planned[-1]

    monkeypatch.setattr(device_side, "link_bytes", note_plan)
    served = tiny.load(device="hpu-sim", buckets=table, **cache, **options)
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

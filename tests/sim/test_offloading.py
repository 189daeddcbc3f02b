"""A tier in host memory beside the simulated HPU: nothing new is compiled after warm-up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from graphs import BucketTable
from hpu_duo.kv.tiers.host_link import HostLink
from hpu_duo.kv.tiers.link import Transfer
from hpu_duo.kv.tiers.policy import LoadPolicy
from hpu_duo.lab import sim
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.modeling.families import BLOCK, prompts_of

pytestmark = pytest.mark.usefixtures("simulated_hpu", "default_buckets")

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
TEXTS = prompts_of((2 * BLOCK + 3, 3 * BLOCK + 1, 3 * BLOCK), seed=9)


def test_transfers_need_nothing_new_after_warm_up(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadPolicy, "loads", lambda *_: True)
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 32, "pattern": PATTERN}
    table = BucketTable.from_strings(["csu/q8/s8/u10/l2"])
    cold = tiny.load(device="cpu", enable_prefix_caching=False, num_blocks=12, **options)
    expected = tokens_of(serve(cold, TEXTS * 3, GREEDY))
    cache = {"num_blocks": 10, "num_prefix_snapshots": 3, "kv_offloading_size": 0.01}
    served = tiny.load(device="hpu-sim", buckets=table, **cache, **options)
    served.warmup()
    shapes, units_of = set[tuple[bool, int]](), HostLink._units

    def units(link: HostLink, batch: Sequence[Transfer]) -> torch.Tensor:
        found = units_of(link, batch)
        shapes.add((batch[0].is_row, len(found)))
        return found

    monkeypatch.setattr(HostLink, "_units", units)
    with sim.watch() as seen:
        assert tokens_of(serve(served, TEXTS * 3, GREEDY)) == expected
    offload = served.stats().offload
    assert offload is not None
    assert offload.num_loaded > 0
    report = seen.report()
    assert (report.new_graphs, report.new_recipes) == (0, 0)
    assert not report.excused
    # Blocks and rows, each padded to one number in both directions; a step reads its results only.
    assert sorted(is_row for is_row, _ in shapes) == [False, True]
    assert report.max_reads == 1

"""Heads with a KV budget on the simulated HPU: the tokens of the CPU, and nothing new after warm-up."""

from __future__ import annotations

import pytest

from hpu_duo import HeadPattern, sim
from tests.engine.tiny import PATTERN, Tiny
from tests.sim.workload import LIMITS, Workload

pytestmark = pytest.mark.usefixtures("device")


ROTARY = [("streaming-llm:positions=cache", None), ("expected-attention", None)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "pattern"), [("h2o", None), ("tova", PATTERN), ("snapkv:window=4", None), *ROTARY], ids=str
)
def test_requests_get_the_tokens_of_the_cpu_without_anything_new_after_warm_up(
    tiny: Tiny, policy: str, pattern: HeadPattern | None
) -> None:
    work = Workload.random(40, seed=3)
    budget = {"kv_policy": policy, "kv_budget": 10, "kv_chunk": 8, "enable_prefix_caching": False}
    options = {**LIMITS, **budget, "pattern": pattern}
    served = tiny.load(device="hpu-sim", **options)
    runner = served.engine.runner
    assert served.warmup().num_captured == len(runner.graphs.table)
    with sim.watch() as seen:
        done = work.run(served)
    report = seen.report()
    assert (report.new_graphs, report.new_recipes) == (0, 0)
    assert (runner.graphs.counters.misses, runner.graphs.counters.late_captures) == (0, 0)
    assert not report.excused
    on_cpu = tiny.load(device="cpu", buckets=runner.graphs.table, **options)
    assert work.run(on_cpu) == done

"""Heads with an attention rule on the simulated HPU: the tokens of the CPU, and nothing new after warm-up."""

from __future__ import annotations

import pytest

from hpu_duo import HeadPattern
from hpu_duo.lab import sim
from tests.engine.tiny import PATTERN, Tiny
from tests.sim.workload import LIMITS, Workload

pytestmark = pytest.mark.usefixtures("simulated_hpu", "default_buckets")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "pattern"),
    [
        pytest.param("sink_band:sink=2,band=7", None, marks=pytest.mark.exhaustive),
        pytest.param("fixed:stride=8,summary=2", PATTERN, marks=pytest.mark.exhaustive),
        ("strided:stride=6|dilated:width=5,dilation=4", PATTERN),
    ],
    ids=["sink-band", "fixed-duo", "strided-or-dilated-duo"],
)
def test_requests_get_the_tokens_of_the_cpu_without_anything_new_after_warm_up(
    tiny: Tiny, rule: str, pattern: HeadPattern | None
) -> None:
    work = Workload.random(20, seed=3)
    options = {**LIMITS, "max_num_seqs": 4, "attention_rule": rule, "pattern": pattern}
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

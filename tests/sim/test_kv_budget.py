"""Heads with a KV budget on the simulated HPU: the tokens of the CPU, and nothing new after warm-up."""

from __future__ import annotations

from typing import Any

import pytest

from hpu_duo.config.kv_plan import Keep, KVPlan
from hpu_duo.lab import sim
from tests.engine.tiny import PATTERN, Tiny
from tests.sim.workload import LIMITS, Workload

pytestmark = pytest.mark.usefixtures("simulated_hpu", "default_buckets")


WHOLE = {"kv_prompt": "whole", "kv_chunk": None, "max_num_batched_tokens": 67}
DRAFTS = {"speculative_config": {"num_speculative_tokens": 3}, "max_num_batched_tokens": 32}
PLAN = KVPlan(
    (
        (Keep("h2o", 10), Keep("ring:sink=2,recent=6")),
        (Keep("tova", 6), Keep("all")),
    )
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"kv_policy": "h2o", "kv_budget": 10}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"kv_policy": "tova", "kv_budget": 10, "pattern": PATTERN}, marks=pytest.mark.exhaustive
        ),
        pytest.param({"kv_policy": "snapkv:window=4", "kv_budget": 10}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"kv_policy": "streaming-llm:positions=cache", "kv_budget": 10}, marks=pytest.mark.exhaustive
        ),
        pytest.param({"kv_policy": "h2o:positions=cache", "kv_budget": 10}, marks=pytest.mark.exhaustive),
        pytest.param({"kv_policy": "expected-attention", "kv_budget": 10}, marks=pytest.mark.exhaustive),
        # test_kept_tokens.py captures such a plan, too.
        pytest.param({"kv_plan": PLAN}, marks=pytest.mark.exhaustive),
        pytest.param({"kv_policy": "fastgen", "kv_budget": 10}, marks=pytest.mark.exhaustive),
        pytest.param({"kv_policy": "h2o", "kv_budget": 10, **WHOLE}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"kv_policy": "h2o", "kv_budget": 10, "kv_prompt": "whole"}, marks=pytest.mark.exhaustive
        ),
        pytest.param(
            {"kv_policy": "snapkv:window=4", "kv_budget": 10, "kv_prompt": "whole", "pattern": PATTERN},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param({"kv_policy": "h2o", "kv_budget": 10, **DRAFTS}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"kv_policy": "tova:positions=cache", "kv_budget": 10, "pattern": PATTERN, **DRAFTS},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=[
        *("h2o", "tova-beside-blocks", "snapkv", "streaming-llm", "h2o-in-cache"),
        *("expected-attention", "plan", "fastgen"),
        *("whole", "whole-in-chunks", "whole-in-chunks-beside-blocks"),
        *("h2o-with-drafts", "tova-in-cache-with-drafts"),
    ],
)
def test_requests_get_the_tokens_of_the_cpu_without_anything_new_after_warm_up(
    tiny: Tiny, options: dict[str, Any]
) -> None:
    work = Workload.random(16, seed=3)
    options = {**LIMITS, "kv_chunk": 8, "enable_prefix_caching": False, **options}
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

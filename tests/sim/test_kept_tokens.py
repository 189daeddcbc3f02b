"""Kept tokens of heads with a KV budget on captured steps, on the simulated HPU and elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from graphs import BucketTable
from graphs.backends.compile import CompileBackend
from hpu_duo import HPUDuoModel
from hpu_duo.config.kv_plan import Keep, KVPlan
from hpu_duo.lab import sim
from hpu_duo.lab.kept_tokens import kept_tokens, num_computed
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import Tiny

PLAN = KVPlan(((Keep("h2o", 10), Keep("ring:sink=2,recent=6")), (Keep("tova", 6), Keep("all"))))
TABLE = BucketTable.from_strings(["csu/q16/s24/u24/l2"])
NUM_PROMPT, NUM_TOKENS = 21, 26


def kept(served: HPUDuoModel) -> list[list[list[int]]]:
    """Positions by layer and head once so many tokens have been through the model."""
    engine, params = served.engine, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine.add_request(list(range(3, 3 + NUM_PROMPT)), params, request_id="a")
    engine.add_request(list(range(9, 20)), params, request_id="beside")
    while (num_computed(engine, "a") or 0) < NUM_TOKENS:
        engine.step()
    found = [[head.positions.tolist() for head in layer] for layer in kept_tokens(engine, "a").layers]
    for request_id in ("a", "beside"):
        engine.abort(request_id)
    return found


def loaded(tiny: Tiny, **options: Any) -> HPUDuoModel:
    limits = {"max_num_seqs": 2, "kv_plan": PLAN, "kv_chunk": 8, "enable_prefix_caching": False}
    return tiny.load(**limits, **options)


def assert_nothing_new(served: HPUDuoModel) -> None:
    counters = served.engine.runner.graphs.counters
    assert (counters.misses, counters.late_captures) == (0, 0)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_compiled_steps_keep_what_eager_steps_keep_and_capture_nothing_late(tiny: Tiny) -> None:
    expected = kept(loaded(tiny, device="cpu"))
    assert [[len(head) for head in layer] for layer in expected] == [[10, 8], [6, NUM_TOKENS]]
    served = loaded(tiny, device="cpu", graphs=CompileBackend("eager"), buckets=TABLE)
    served.warmup()
    assert kept(served) == expected
    assert_nothing_new(served)


@pytest.mark.slow
@pytest.mark.usefixtures("simulated_hpu")
def test_the_simulated_hpu_keeps_the_same_without_findings_or_new_graphs(tiny: Tiny) -> None:
    served = loaded(tiny, device="hpu-sim", buckets=TABLE)
    served.warmup()
    with sim.watch() as seen:
        found = kept(served)
    report = seen.report()
    assert (report.new_graphs, report.new_recipes) == (0, 0)
    assert not report.excused
    assert_nothing_new(served)
    assert found == kept(loaded(tiny, device="cpu", buckets=TABLE))

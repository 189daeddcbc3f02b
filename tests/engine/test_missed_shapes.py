"""Shapes that no bucket holds are run, and nothing is kept of them."""

from __future__ import annotations

from graphs import BucketTable
from graphs.backends.compile import CompileBackend
from tests.engine.tiny import Tiny


def test_any_number_of_missed_shapes_keeps_a_bounded_number_of_steps(tiny: Tiny) -> None:
    served = tiny.load(
        graphs=CompileBackend("eager"), buckets=BucketTable(()), on_miss="eager", max_num_batched_tokens=64
    )
    for length in range(2, 14):
        served.engine.generate([[1] * length])
    executor = served.engine.runner.executor
    assert executor.graphs.counters.eager_runs >= 12
    assert len(executor.step_of.__self__) == 1

"""Compiled steps over a warmed table: nothing is compiled, and nothing misses, while requests run."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from graphs import BatchShape, BucketTable, CaptureBackend, GraphMissError
from graphs.backends.compile import CompileBackend
from hpu_duo import HPUDuoModel
from hpu_duo.modeling.step_model import StepModel
from hpu_duo.sampling import SamplingParams
from kernels_ref import sdpa
from kernels_ref.sdpa import write_as_operator
from tests.engine.tiny import MAX_LEN, PATTERN, Tiny, assert_holds_nothing
from tests.modeling.families import VOCAB
from tests.tiers import every

NUM_REQUESTS = 80
TABLE = BucketTable.from_strings(
    [
        *("--u/q1/s0/u12/l1", "--u/q4/s0/u12/l4", "-su/q4/s12/u12/l4"),
        *("c-u/q16/s0/u12/l4", "csu/q16/s12/u12/l4"),
    ]
)
"""Buckets of steps with prompts or without, with shared blocks or without, and a smaller one."""


class CountingRegions(CompileBackend):
    """Keeps the functions that it hands out; each is compiled once."""

    def __init__(self, compiler: str, guards: bool) -> None:
        super().__init__(compiler, guards)
        self.regions = set[Callable[..., Any]]()

    def region(self, shape: BatchShape, key: Hashable, fn: Any) -> Any:
        made = super().region(shape, key, fn)
        self.regions.add(made)
        return made


def run_workload(served: HPUDuoModel) -> dict[str, list[int]]:
    """Requests of mixed lengths that arrive while others run; some are aborted, some fork."""
    rng = random.Random(5)
    engine = served.engine
    outputs: dict[str, list[int]] = {}
    waiting = iter(range(NUM_REQUESTS))
    is_open = True
    while is_open or engine.has_unfinished:
        for _ in range(rng.randint(0, 3)):
            number = next(waiting, None)
            if number is None:
                is_open = False
                break
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 3, 8, 9, 20, 41)))]
            params = SamplingParams(
                temperature=rng.choice((0.0, 1.0)),
                seed=number,
                n=rng.choice((1, 1, 1, 2)),
                max_tokens=rng.randint(1, 9),
                ignore_eos=True,
            )
            engine.add_request(prompt, params, request_id=f"r{number}")
        if rng.random() < 0.03:
            engine.abort(f"r{rng.randrange(NUM_REQUESTS)}")
        for output in engine.step():
            key = f"{output.request_id}#{output.sample_index}"
            outputs.setdefault(key, []).extend(output.token_ids)
    assert_holds_nothing(served)
    return outputs


def load(
    tiny: Tiny,
    graphs: str | CaptureBackend,
    attention: str = "sdpa",
    num_blocks: int = MAX_LEN // 8,
) -> HPUDuoModel:
    """Few blocks, so that requests are also preempted; a head pattern with two kinds of heads."""
    buckets = None if graphs == "eager" or num_blocks != MAX_LEN // 8 else TABLE
    return tiny.load(
        attention=attention, graphs=graphs, pattern=PATTERN, num_blocks=num_blocks, buckets=buckets
    )


@pytest.fixture(scope="module")
def eager_tokens(tiny: Tiny) -> dict[str, list[int]]:
    return run_workload(load(tiny, "eager"))


@pytest.mark.slow
@pytest.mark.parametrize("guards", every(2, [True, False]))
def test_a_warmed_table_serves_requests_without_a_miss_or_a_recompilation(
    tiny: Tiny, eager_tokens: dict[str, list[int]], guards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a compiler makes of a graph does not depend on how the graph was traced.
    backend = CountingRegions("eager" if guards else "inductor", guards=guards)
    served = load(tiny, backend)
    num_written, run = 0, StepModel.logits

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_written
        num_written += 1
        return run(*args, **kwargs)

    graphs = served.engine.runner.graphs
    assert served.warmup().num_captured == len(graphs.table)
    assert set(graphs.captured) == set(graphs.table)
    compiled = counters["stats"]["unique_graphs"]
    monkeypatch.setattr(StepModel, "logits", counted)
    with torch._dynamo.config.patch(error_on_recompile=True):
        tokens = run_workload(served)
    seen = graphs.counters
    assert (seen.misses, seen.late_captures, seen.eager_runs) == (0, 0, 0)
    assert counters["stats"]["unique_graphs"] == compiled, "something was compiled while requests ran"
    stats = served.stats()
    assert (stats.num_graph_misses, stats.num_late_captures) == (0, 0)
    assert stats.num_preemptions > 0
    assert tokens == eager_tokens
    # Without guards the warm-up has also traced each bucket: the model's Python runs no more.
    assert num_written == (stats.num_steps if guards else 0)
    assert len(backend.regions) == len(graphs.table) * len(served.engine.runner.model.kinds)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_portable_attention_traces_into_one_graph_per_bucket_and_kind_of_layer(
    tiny: Tiny, eager_tokens: dict[str, list[int]]
) -> None:
    backend = CountingRegions("eager", guards=True)
    served = load(tiny, backend, "reference")
    served.warmup()
    with torch._dynamo.config.patch(error_on_recompile=True):
        tokens = run_workload(served)
    runner = served.engine.runner
    assert len(backend.regions) == len(runner.graphs.table) * len(runner.model.kinds)
    assert tokens == eager_tokens


@pytest.mark.slow
def test_replayed_steps_serve_requests_as_they_are_written(
    tiny: Tiny, eager_tokens: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, run, num_written = load(tiny, "replay"), StepModel.logits, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_written
        num_written += 1
        return run(*args, **kwargs)

    monkeypatch.setattr(StepModel, "logits", counted)
    compiled = counters["stats"]["unique_graphs"]
    assert run_workload(served) == eager_tokens
    assert counters["stats"]["unique_graphs"] == compiled, "nothing is compiled"
    assert num_written <= 2 * len(served.engine.runner.graphs.table) < served.stats().num_steps


@pytest.mark.slow
@pytest.mark.parametrize("write", every(2, [sdpa.write_kv, write_as_operator]))
def test_compiled_layers_write_their_stores_in_place(
    tiny: Tiny, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "write_kv", write)
    served = load(tiny, CompileBackend(), num_blocks=4000)
    engine = served.engine
    engine.add_request([1, 2, 3, 4, 5], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    engine.step()
    engine.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine.step()
    largest = max(event.self_cpu_memory_usage for event in profiled.events())
    store = engine.runner.store.layers[0][0].views[0]
    assert store[:-1].any()
    assert 0 < largest < store.nbytes / 8, "a copy of the store was made"


@pytest.mark.parametrize("shape", ["--u/q4/s0/u13/l4", "--u/q8/s0/u12/l8"])
def test_a_table_that_points_beyond_the_stores_is_refused(tiny: Tiny, shape: str) -> None:
    table = BucketTable.from_strings([shape])
    with pytest.raises(ValueError, match="at most 12 unique blocks and 4 logit rows") as raised:
        tiny.load(graphs="compile", buckets=table, num_blocks=12, max_num_seqs=4)
    assert shape in str(raised.value)


def test_a_miss_names_the_shape_and_leaves_the_engine_serving(tiny: Tiny) -> None:
    table = BucketTable.from_strings(["--u/q1/s0/u12/l1", "c--/q8/s0/u0/l1"])
    served = tiny.load(graphs=CompileBackend("eager"), buckets=table, num_blocks=12)
    with pytest.raises(GraphMissError, match="no bucket holds c--/q9"):
        served.engine.generate([[1] * 9], SamplingParams(temperature=0.0, max_tokens=2))
    done = served.engine.generate([[1] * 8], SamplingParams(temperature=0.0, max_tokens=2))
    assert len(done[0][0].token_ids) == 2

"""Every source tells what it saw, and a watch tells what is new."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch

from graphs import BatchShape, BucketTable, EagerBackend, GraphCache, MissPolicy, RecompileError
from graphs.backends.compile import CompileBackend
from graphs.backends.cuda import CudaBackend
from hpu_duo.device import CpuRuntime, DeviceMetrics
from hpu_duo.device.habana import HabanaRuntime
from hpu_duo.engine.compile_watch import CacheSource, CompileWatch, Counts, DeviceSource, DynamoSource, Tally
from hpu_duo.lab import sim
from tests.graphs.operator_graph import OperatorRecorder
from tests.vendor import importable

A, B = BatchShape.parse("--u/q4/s0/u0/l4"), BatchShape.parse("--u/q8/s0/u0/l8")


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


def run(cache: GraphCache, shape: BatchShape) -> None:
    bucket = cache.resolve(shape)
    cache.run(bucket, lambda inputs: inputs["x"] * 2, {"x": torch.zeros(bucket.query_len)})


def test_the_cache_tells_captures_from_late_ones_and_counts_misses() -> None:
    cache = GraphCache(EagerBackend(), BucketTable((A,)), MissPolicy.CAPTURE)
    source = CacheSource(lambda: cache)
    run(cache, A)
    warm = source.read()
    assert warm == Tally(graphs={str(A): 1})
    cache.seal()
    run(cache, B)
    run(cache, B)
    assert source.read() - warm == Tally(recompiles={str(B): 1}, misses=1)


def test_a_new_table_of_an_engine_is_followed() -> None:
    caches = [GraphCache(EagerBackend(), BucketTable((A,)))]
    source = CacheSource(lambda: caches[-1])
    caches.append(caches[0].with_table(BucketTable((B,)), MissPolicy.ERROR))
    run(caches[1], B)
    assert source.read().graphs == {str(B): 1}


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.inference_mode()
def test_the_compiler_names_the_region_and_tells_the_first_time_from_the_next() -> None:
    source = DynamoSource()
    before = source.read()
    backend = CompileBackend("eager", guards=True)
    regions = [backend.region(shape, "layer", double) for shape in (A, B)]
    for region in (*regions, *regions):
        region(torch.ones(3))
    assert source.read() - before == Tally(graphs={f"double@{A}": 1, f"double@{B}": 1})
    before = source.read()
    regions[0](torch.ones(5))
    assert source.read() - before == Tally(recompiles={f"double@{A}": 1})


@torch.inference_mode()
def test_equal_regions_of_two_models_are_two_graphs_and_no_recompilation() -> None:
    source = DynamoSource()
    before = source.read()
    for _ in range(2):
        CompileBackend("eager").region(A, "layer", double)(torch.ones(3))
    assert source.read() - before == Tally(graphs={f"double@{A}": 2})


@pytest.mark.usefixtures("vendor")
def test_the_device_counts_compilations_and_names_what_fell_back() -> None:
    runtime = HabanaRuntime()
    metrics = importlib.import_module("habana_frameworks.torch.hpu.metrics")
    assert runtime.metrics() == DeviceMetrics({"graphs": 0}, {})
    source = DeviceSource(runtime)
    before = source.read()
    metrics.compiled()
    for operator in ("aten::nonzero", "aten::nonzero", "aten::sort"):
        metrics.fell_back(operator)
    new = Counts({source.name: source.read() - before})
    assert (new.num_graphs, new.num_fallbacks) == (1, 3)
    assert new.findings == (
        "the device compiled graphs",
        "the device ran on the host's CPU: aten::nonzero 2 times",
        "the device ran on the host's CPU: aten::sort",
    )


def test_the_simulator_tells_graphs_and_operators_outside_of_them(simulated_hpu: sim.SimulatedHpu) -> None:
    source = DeviceSource(sim.SimRuntime(simulated_hpu))
    x = torch.zeros(4, device="hpu")
    before = source.read()
    step = sim.SimBackend(simulated_hpu).capture(lambda inputs: inputs["x"] * 3, A)
    for _ in range(2):
        step({"x": x})
    assert source.read() - before == Tally(graphs={str(A): 1})
    assert (x * 0.12345).tolist() == [0] * 4
    assert source.read() - before == Tally(graphs={str(A): 1, "operators outside of graphs": 1})


def test_totals_are_the_most_that_one_source_saw_because_all_see_the_same() -> None:
    counts = Counts(
        {
            "cache": Tally(graphs={"a": 1, "b": 1}, fallbacks={"d": 1}),
            "device": Tally(graphs={"graphs": 7}, recompiles={"c": 1}),
        }
    )
    assert (counts.num_graphs, counts.num_fallbacks) == (7, 1)
    assert Counts({}).num_graphs == 0


def test_nothing_new_may_be_compiled_where_that_is_forbidden() -> None:
    cache = GraphCache(EagerBackend(), BucketTable((A, B)))
    watch = CompileWatch([CacheSource(lambda: cache)])
    run(cache, A)
    before = watch.snapshot()
    run(cache, A)
    watch.forbid_since(before)
    run(cache, B)
    with pytest.raises(RecompileError, match=f"after warm-up, got the graph cache compiled {B}$") as raised:
        watch.forbid_since(before)
    assert raised.value.findings == (f"the graph cache compiled {B}",)
    before = watch.snapshot()
    run(cache, B)
    watch.forbid_since(before)


def test_a_watch_has_every_source_that_there_is() -> None:
    captured = GraphCache(CudaBackend(OperatorRecorder()), BucketTable((A,)))
    names = [source.name for source in CompileWatch.of(lambda: captured, CpuRuntime()).sources]
    assert names == ["the graph cache", "torch.compile"]


@pytest.mark.usefixtures("vendor")
def test_on_hpu_the_device_is_a_source() -> None:
    captured = GraphCache(CudaBackend(OperatorRecorder()), BucketTable((A,)))
    names = [source.name for source in CompileWatch.of(lambda: captured, HabanaRuntime()).sources]
    assert names == ["the graph cache", "torch.compile", "the device"]

"""Layers whose loops run outside of their graphs serve the same tokens, and compile nothing after warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from graphs import BatchShape, BucketTable
from graphs.backends.compile import CompileBackend
from graphs.backends.hpu import HpuCompileBackend
from hpu_duo import HPUDuoModel
from hpu_duo.modeling.attention import AttentionLayer
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup.blueprint import chunk_bounds
from kernels_ref import Implementation, Scoring, StepParts
from kernels_ref.chunks import ChunkBounds, Slices
from kernels_ref.hpu.attention import NO_OPERATORS
from kernels_ref.impl import LoopedKernels, kernels, looped
from tests.engine.tiny import PATTERN, Tiny, serve
from tests.modeling.families import prompts_of
from tests.vendor import choose_mode, importable

TABLE = BucketTable(tuple(map(BatchShape.parse, ("--u/q4/s0/u40/l4", "csu/q16/s40/u40/l4"))))
PARAMS = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = prompts_of([60, 9, 33, 70])


def load(tiny: Tiny, **options: object) -> HPUDuoModel:
    return tiny.load(device="cpu", pattern=PATTERN, num_blocks=40, **options)


class VendorsOnCpu(HpuCompileBackend):
    """The vendor's way to compile, for layers whose tensors are on the CPU."""

    def problem(self, device: torch.device) -> str | None:
        return None


def num_compiled() -> int:
    """Graphs that the stand-in of the vendor's compiler has got."""
    metrics = import_module("habana_frameworks.torch.hpu.metrics")
    return int(dict(metrics.metric_global("graph_compilation").stats())["TotalNumber"])


@pytest.fixture(params=[pytest.param("traced", marks=pytest.mark.exhaustive), "vendor"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileBackend]:
    for _ in importable(monkeypatch):
        choose_mode(monkeypatch, is_lazy=False)
        torch._dynamo.reset()
        if request.param == "traced":
            yield CompileBackend("eager", guards=True)
        else:
            yield VendorsOnCpu()


@pytest.mark.slow
def test_loops_outside_of_layers_serve_the_same_tokens(tiny: Tiny, backend: CompileBackend) -> None:
    expected = serve(load(tiny), PROMPTS, PARAMS)
    served = load(tiny, graphs=backend, buckets=TABLE, fail_on_recompile=True)
    bounds = ChunkBounds(score_bytes=2048, unique_bytes=2000, key_slots=16, most_inline=1)
    for module in served.engine.runner.model.model.modules():
        if isinstance(module, AttentionLayer):
            module.spec = replace(module.spec, slices=Slices(4), chunks=bounds)
    served.warmup()
    warmed = num_compiled()
    assert (warmed > len(backend.keys)) is isinstance(backend, HpuCompileBackend)
    got = serve(served, PROMPTS, PARAMS)
    assert num_compiled() == warmed
    assert [each[0].token_ids for each in got] == [each[0].token_ids for each in expected]
    bodies = {key[1] for _, key in backend.keys if isinstance(key, tuple) and key[0] == "loop"}
    assert bodies >= {"own_keys", "shared_chunk", "rings", "unique_chunk", "sinks_before"}


@pytest.mark.parametrize(
    ("device", "impl", "are_cut"),
    [
        ("hpu", Implementation.REFERENCE, True),
        ("hpu", Implementation.HPU, True),
        ("cuda", Implementation.REFERENCE, True),
        ("cuda", Implementation.SDPA, False),
        ("cpu", Implementation.REFERENCE, False),
    ],
)
def test_kernels_without_loops_in_a_graph_are_not_replaced(
    device: str, impl: Implementation, are_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    run = kernels(impl)
    scoring = Scoring(None, chunks=chunk_bounds(1 << 20, torch.device(device), impl))
    found = looped(run, scoring, NO_OPERATORS, StepParts(True, True, True))
    assert isinstance(found, LoopedKernels) if are_cut else found is run

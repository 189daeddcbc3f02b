"""Whole engines over each way of capturing: the tokens of eager steps, and nothing compiled after warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphs import BucketTable, CaptureBackend, RecompileError
from graphs.backends.compile import CompileBackend
from graphs.backends.cuda import CudaBackend
from graphs.backends.hpu import HpuGraphBackend
from hpu_duo import HPUDuoModel
from hpu_duo.lab import sim
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, serve, tokens_of
from tests.graphs.operator_graph import OperatorRecorder
from tests.modeling.families import prompts_of
from tests.tiers import further
from tests.vendor import calls, importable

PROMPTS = prompts_of([3, 14, 25, 9, 1], seed=8)
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
LIMITS: dict[str, Any] = {"pattern": PATTERN, "max_model_len": 32, "num_blocks": 16}
FEW = BucketTable.from_strings(["--u/q4/s0/u16/l4", "csu/q8/s16/u16/l4", "csu/q16/s16/u16/l4"])
"""They hold every step; compiling takes seconds for each."""

LONG = 8
"""Query tokens of a bucket that is not captured below."""


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for _ in importable(monkeypatch):
        yield monkeypatch


@pytest.fixture(scope="module")
def eager_tokens(tiny: Tiny) -> list[list[list[int]]]:
    return tokens_of(serve(tiny.load(device="cpu", **LIMITS), PROMPTS, PARAMS))


def backend_of(name: str, monkeypatch: pytest.MonkeyPatch) -> CaptureBackend:
    """CUDA graphs by recorded operators, HPU's compiler by its stand-in, both on the CPU."""
    if name == "operators":
        return CudaBackend(OperatorRecorder())
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    __import__("habana_frameworks.torch")
    return CompileBackend("hpu_backend", guards=True)


def check_quiet(served: HPUDuoModel, expected: list[list[list[int]]], limit: int | None) -> None:
    """Serve twice what was warmed up for."""
    warmed = served.engine.runner.graphs.counters
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert tokens_of(serve(served, PROMPTS, PARAMS)) == expected
    seen, stats = served.engine.runner.graphs.counters, served.stats()
    assert (seen.captures, seen.misses) == (warmed.captures, 0)
    long_steps = sum(
        count for bucket, count in seen.runs.items() if limit is not None and bucket.query_len > limit
    )
    assert stats.num_uncaptured_steps == long_steps
    assert (long_steps > 0) is (limit is not None)
    assert stats.num_padded_tokens > 0


@pytest.mark.parametrize(
    ("name", "limit"), [("operators", None), *further(("operators", LONG)), ("hpu_backend", LONG)]
)
def test_a_warmed_engine_serves_the_tokens_of_eager_steps_and_compiles_nothing(
    tiny: Tiny,
    eager_tokens: list[list[list[int]]],
    vendor: pytest.MonkeyPatch,
    name: str,
    limit: int | None,
) -> None:
    served = tiny.load(
        device="cpu",
        graphs=backend_of(name, vendor),
        max_captured_tokens=limit,
        fail_on_recompile=True,
        buckets=FEW if name == "hpu_backend" else None,
        **LIMITS,
    )
    graphs = served.engine.runner.graphs
    served.warmup()
    long = [bucket for bucket in graphs.table if limit is not None and bucket.query_len > limit]
    assert set(graphs.captured) == set(graphs.table) - set(long)
    check_quiet(served, eager_tokens, limit)


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [None, LONG])
def test_cuda_graphs_serve_the_tokens_of_eager_steps_on_the_same_device(
    tiny: Tiny, limit: int | None
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    options: dict[str, Any] = {**LIMITS, "device": "cuda", "dtype": "float32"}
    expected = tokens_of(serve(tiny.load(**options), PROMPTS, PARAMS))
    served = tiny.load(graphs="auto", max_captured_tokens=limit, fail_on_recompile=True, **options)
    assert served.engine.runner.graphs.backend.name == "cuda"
    served.warmup()
    check_quiet(served, expected, limit)


def test_buckets_captured_by_requests_are_as_good_as_warmed_ones(
    tiny: Tiny, eager_tokens: list[list[list[int]]]
) -> None:
    served = tiny.load(device="cpu", graphs=CudaBackend(OperatorRecorder()), **LIMITS)
    assert tokens_of(serve(served, PROMPTS, PARAMS)) == eager_tokens
    assert served.engine.runner.graphs.counters.captures > 0


@pytest.mark.usefixtures("simulated_hpu", "default_buckets")
def test_on_the_simulated_hpu_long_prefills_are_compiled_in_warm_up_and_nothing_later(
    tiny: Tiny, eager_tokens: list[list[list[int]]]
) -> None:
    served = tiny.load(
        device="hpu-sim", graphs="auto", max_captured_tokens=LONG, fail_on_recompile=True, **LIMITS
    )
    served.warmup()
    with sim.watch() as seen:
        check_quiet(served, eager_tokens, LONG)
    assert (seen.report().new_graphs, seen.report().new_recipes, seen.report().max_reads) == (0, 0, 1)
    assert [source.name for source in served.engine.runner.watch.sources][-1] == "the simulated HPU"


@pytest.mark.usefixtures("simulated_hpu", "default_buckets")
def test_hpu_graphs_record_the_engine_of_the_simulated_hpu(
    tiny: Tiny, eager_tokens: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in importable(monkeypatch):
        monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
        served = tiny.load(device="hpu-sim", graphs=HpuGraphBackend(), **LIMITS)
        served.warmup()
        captured = calls()["capture"]
        assert captured == len(served.engine.runner.graphs.table)
        check_quiet(served, eager_tokens, None)
        assert calls()["capture"] == captured
        assert calls()["replay"] > 2 * len(PROMPTS)


def test_a_step_that_compiles_something_is_refused_and_the_request_is_served_afterwards(
    tiny: Tiny, eager_tokens: list[list[list[int]]]
) -> None:
    served = tiny.load(device="cpu", graphs=CudaBackend(OperatorRecorder()), fail_on_recompile=True, **LIMITS)
    engine, refused = served.engine, []
    names = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    while engine.has_unfinished:
        try:
            outputs = engine.step()
        except RecompileError as error:
            refused.append(error.findings)
            continue
        for output in outputs:
            tokens[output.request_id].extend(output.token_ids)
    captured = served.engine.runner.graphs.captured
    assert refused == [(f"the graph cache compiled {bucket}",) for bucket in captured] != []
    assert list(tokens.values()) == [samples[0] for samples in eager_tokens]


@pytest.mark.parametrize(
    ("graphs", "problem"),
    [
        ("cuda", "CUDA graphs record steps on device 'cuda', got 'cpu'"),
        ("hpu-compile", "compiled regions are for device 'hpu', got 'cpu'"),
        ("hpu-graph", "HPU graphs are for device 'hpu', got 'cpu'"),
    ],
)
def test_a_backend_of_another_device_is_refused_by_name(tiny: Tiny, graphs: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"graphs='{graphs}' cannot be used: {problem}"):
        tiny.load(device="cpu", graphs=graphs)


@pytest.mark.parametrize(("graphs", "set_by_user"), [("hpu-graph", "0"), ("hpu-compile", "1")])
def test_the_other_mode_of_hpu_is_refused_before_anything_is_loaded(
    tiny: Tiny, vendor: pytest.MonkeyPatch, graphs: str, set_by_user: str
) -> None:
    vendor.setenv("PT_HPU_LAZY_MODE", set_by_user)
    wanted = 1 - int(set_by_user)
    with pytest.raises(
        ValueError, match=f"expected PT_HPU_LAZY_MODE={wanted} .*, got PT_HPU_LAZY_MODE={set_by_user}"
    ):
        tiny.load(device="hpu", graphs=graphs)


def test_an_own_backend_is_asked_whether_it_can_build_code_here(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphs.backends.compile.shutil.which", lambda name: None)
    with pytest.raises(ValueError, match=r"graphs='compile' cannot be used: .* no C\+\+ compiler"):
        tiny.load(device="cpu", graphs=CompileBackend())


def test_an_object_that_is_no_backend_is_refused(tiny: Tiny) -> None:
    class Half:
        name = "half"

        def capture(self) -> None: ...

    with pytest.raises(
        ValueError, match="expected graphs to be default, auto, eager, replay, compile, cuda, hpu-compile"
    ):
        tiny.load(device="cpu", graphs=Half())


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("max_captured_tokens", 0, "max_captured_tokens to be an integer >= 1, got 0"),
        ("graph_memory_bytes", -1, "graph_memory_bytes to be an integer >= 0, got -1"),
        ("fail_on_recompile", "yes", "fail_on_recompile to be True or False, got 'yes'"),
    ],
)
def test_options_of_graphs_are_checked(tiny: Tiny, option: str, value: object, problem: str) -> None:
    with pytest.raises(ValueError, match=f"expected {problem}"):
        tiny.load(device="cpu", buckets=BucketTable(()), **{option: value})

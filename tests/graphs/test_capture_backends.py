"""Every backend gives the results of the step as it is written, and does its effects once per call."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

import graphs
from graphs import BatchShape, CaptureBackend, EagerBackend, make_backend
from graphs.backends import BACKEND_NAMES, best_name
from graphs.backends.base import WholeStepBackend
from graphs.backends.compile import CompileBackend
from graphs.backends.cuda import CudaBackend
from graphs.backends.hpu import HpuGraphBackend
from graphs.backends.replay import ReplayBackend
from tests.graphs.operator_graph import OperatorRecorder
from tests.vendor import calls, choose_mode

SHAPE = BatchShape.parse("c--/q4/s0/u0/l1")
WIDER = BatchShape.parse("c--/q6/s0/u0/l1")

Step = Callable[[Mapping[str, Tensor]], Tensor]
cuda = pytest.param("cuda", marks=pytest.mark.gpu)
recorded = pytest.mark.parametrize("backend", ["operators", cuda, "hpu-graph"], indirect=True)


@pytest.fixture(
    params=["eager", "replay", "compile", "compile, direct", "operators", cuda, "hpu-compile", "hpu-graph"]
)
def backend(request: pytest.FixtureRequest, vendor: pytest.MonkeyPatch) -> CaptureBackend:
    """Vendors' backends by their stand-ins, on CPU tensors; ``cuda`` on a GPU, ``operators`` in its place."""
    match request.param:
        case "eager":
            return EagerBackend()
        case "replay":
            return make_backend("replay")
        case "compile":
            return CompileBackend("eager", guards=True)
        case "compile, direct":
            return CompileBackend("eager")
        case "operators":
            return CudaBackend(OperatorRecorder())
        case "cuda":
            if not torch.cuda.is_available():
                pytest.skip("no CUDA device")
            return CudaBackend()
        case name:
            choose_mode(vendor, is_lazy=name == "hpu-graph")
            return make_backend(name)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cuda" if request.node.callspec.params.get("backend") == "cuda" else "cpu")


def layer(weight: Tensor, store: Tensor, slots: Tensor, x: Tensor) -> Tensor:
    """Adds to a store, as attention writes keys, and reads it back: a second run would be seen."""
    store.index_add_(0, slots, x)
    return torch.tanh(x @ weight) + store.index_select(0, slots)


class Model:
    """Two layers of one kind with weights and stores of their own."""

    def __init__(self, backend: CaptureBackend | None, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(3)
        self.backend = backend
        self.weights = [torch.randn(5, 5, generator=generator).to(device) for _ in range(2)]
        self.stores = [torch.zeros(8, 5, device=device) for _ in range(2)]
        self.num_written_runs = 0

    def step(self, shape: BatchShape) -> Step:
        run = layer if self.backend is None else self.backend.region(shape, "layer", layer)

        def step(inputs: Mapping[str, Tensor]) -> Tensor:
            self.num_written_runs += 1
            x = inputs["x"] * 0.5
            for weight, store in zip(self.weights, self.stores):
                x = run(weight, store, inputs["slots"], x)
            return x

        return step if self.backend is None else self.backend.capture(step, shape)


def inputs_of(shape: BatchShape, device: torch.device) -> dict[str, Tensor]:
    size = shape.query_len
    return {
        "x": torch.zeros(size, 5, device=device),
        "slots": torch.zeros(size, dtype=torch.int64, device=device),
    }


def refill(inputs: Mapping[str, Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = len(inputs["x"])
    inputs["x"].copy_(torch.randn(size, 5, generator=generator))
    inputs["slots"].copy_(torch.randperm(8, generator=generator)[:size])


@torch.inference_mode()
def test_results_and_effects_are_those_of_the_step_as_it_is_written(
    backend: CaptureBackend, device: torch.device
) -> None:
    captured, written = Model(backend, device), Model(None, device)
    inputs = {shape: inputs_of(shape, device) for shape in (SHAPE, WIDER)}
    steps = {shape: captured.step(shape) for shape in inputs}
    for seed, shape in enumerate([SHAPE, WIDER, SHAPE, SHAPE, WIDER, WIDER, SHAPE]):
        refill(inputs[shape], seed)
        expected = written.step(shape)(inputs[shape])
        torch.testing.assert_close(steps[shape](inputs[shape]), expected)
        for got, store in zip(captured.stores, written.stores):
            torch.testing.assert_close(got, store, msg=f"call {seed}: effects were not done exactly once")


@torch.inference_mode()
def test_a_step_that_fails_at_first_can_be_captured_later(
    backend: CaptureBackend, device: torch.device
) -> None:
    is_broken = True

    def step(inputs: Mapping[str, Tensor]) -> Tensor:
        if is_broken:
            raise ZeroDivisionError("not yet")
        return inputs["x"] * 2

    captured, inputs = backend.capture(step, SHAPE), inputs_of(SHAPE, device)
    with pytest.raises(ZeroDivisionError):
        captured(inputs)
    is_broken = False
    for seed in range(3):
        refill(inputs, seed)
        torch.testing.assert_close(captured(inputs), inputs["x"] * 2)


@torch.inference_mode()
def test_nested_results_come_back_nested(backend: CaptureBackend, device: torch.device) -> None:
    captured = backend.capture(lambda inputs: (inputs["x"] + 1, [inputs["slots"] * 2]), SHAPE)
    inputs = inputs_of(SHAPE, device)
    for seed in range(3):
        refill(inputs, seed)
        plus_one, (twice,) = captured(inputs)
        torch.testing.assert_close(plus_one, inputs["x"] + 1)
        torch.testing.assert_close(twice, inputs["slots"] * 2)


@torch.inference_mode()
def test_whole_steps_are_replayed_without_their_python_and_regions_without_their_own(
    backend: CaptureBackend, device: torch.device
) -> None:
    model, inputs = Model(backend, device), inputs_of(SHAPE, device)
    step = model.step(SHAPE)
    step(inputs)
    first = model.num_written_runs
    for _ in range(5):
        step(inputs)
    written = 0 if isinstance(backend, WholeStepBackend | ReplayBackend) else 5
    assert model.num_written_runs - first == written


@torch.inference_mode()
@recorded
def test_a_recorded_step_refuses_inputs_that_have_moved(
    backend: CaptureBackend, device: torch.device
) -> None:
    step, inputs = backend.capture(lambda inputs: inputs["x"] * 2, SHAPE), inputs_of(SHAPE, device)
    step(inputs)
    assert step(dict(inputs)).shape == (4, 5)
    with pytest.raises(
        ValueError, match=r"c--/q4/s0/u0/l1: expected inputs where they were .* others for x$"
    ):
        step({**inputs, "x": inputs["x"].clone()})


@torch.inference_mode()
@recorded
def test_a_replay_overwrites_what_the_one_before_it_returned(
    backend: CaptureBackend, device: torch.device
) -> None:
    step, inputs = backend.capture(lambda inputs: inputs["x"] * 2, SHAPE), inputs_of(SHAPE, device)
    step(inputs)
    before = step(inputs)
    inputs["x"].fill_(3)
    assert step(inputs) is before
    assert before.eq(6).all()


@torch.inference_mode()
def test_each_step_above_the_limit_is_told_once_with_its_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = CudaBackend(OperatorRecorder(), max_operators=2)
    for shape, num_operators in ((SHAPE, 2), (WIDER, 3), (BatchShape.parse("c--/q8/s0/u0/l1"), 4)):

        def step(inputs: Mapping[str, Tensor], num_operators: int = num_operators) -> Tensor:
            x = inputs["x"]
            for _ in range(num_operators):
                x = x * 2
            return x

        for _ in range(2):
            backend.capture(step, shape)(inputs_of(shape, torch.device("cpu")))
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("the graph of c--/q6/s0/u0/l1 has 3 operators, and cuda expects 2 ")
    assert second.startswith("the graph of c--/q8/s0/u0/l1 has 4 operators, and cuda expects 2 ")
    with pytest.raises(ValueError, match="expected max_operators >= 1, got 0"):
        CudaBackend(OperatorRecorder(), max_operators=0)


@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_a_backend_is_made_by_its_name_without_what_it_needs(name: str) -> None:
    assert make_backend(name).name == name


@pytest.mark.parametrize("name", ["", "Eager", "inductor"])
def test_an_unknown_backend_is_refused_with_the_known_names(name: str) -> None:
    known = "eager, replay, compile, cuda, hpu-compile, hpu-graph"
    with pytest.raises(ValueError, match=f"out of {known}, got '{name}'"):
        make_backend(name)


@pytest.mark.parametrize(
    ("name", "device", "problem"),
    [
        ("replay", "cuda:0", "steps are replayed on device 'cpu', got 'cuda:0'"),
        ("cuda", "cpu", "CUDA graphs record steps on device 'cuda', got 'cpu'"),
        ("hpu-compile", "cpu", "compiled regions are for device 'hpu', got 'cpu'"),
        ("hpu-graph", "cuda:0", "HPU graphs are for device 'hpu', got 'cuda:0'"),
        ("hpu-graph", "hpu:0", "HPU graphs need the package habana_frameworks, which is not installed"),
        ("compile", "hpu:0", "inductor builds no code for 'hpu', where 'hpu-compile' is expected"),
    ],
)
def test_a_backend_says_what_it_expects_and_what_it_got(name: str, device: str, problem: str) -> None:
    assert make_backend(name).problem(torch.device(device)) == problem
    assert make_backend("eager").problem(torch.device(device)) is None


@pytest.mark.parametrize(("name", "needs"), [("hpu-compile", "eager mode"), ("hpu-graph", "lazy mode")])
def test_each_backend_of_hpu_needs_its_own_mode(vendor: pytest.MonkeyPatch, name: str, needs: str) -> None:
    choose_mode(vendor, is_lazy=name != "hpu-graph")
    problem = make_backend(name).problem(torch.device("hpu", 0))
    assert problem is not None
    assert re.search(rf"need {needs} \(PT_HPU_LAZY_MODE=.\), got ", problem)


def test_the_vendor_is_content_with_hpu_and_the_right_mode(vendor: pytest.MonkeyPatch) -> None:
    choose_mode(vendor, is_lazy=True)
    assert HpuGraphBackend().problem(torch.device("hpu", 0)) is None


def test_a_compiler_of_code_for_the_cpu_is_asked_for_where_one_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("graphs.backends.compile.shutil.which", lambda name: None)
    cpu = torch.device("cpu")
    assert re.search(r"no C\+\+ compiler", CompileBackend().problem(cpu) or "")
    assert CompileBackend("eager").problem(cpu) is None
    assert CompileBackend().problem(torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("device", "is_lazy", "name"),
    [
        ("cpu", False, "replay"),
        ("cuda", False, "cuda"),
        ("hpu", False, "hpu-compile"),
        ("hpu", True, "hpu-graph"),
    ],
)
def test_the_best_backend_follows_from_device_and_mode(device: str, is_lazy: bool, name: str) -> None:
    assert best_name(device, is_lazy) == name


@torch.inference_mode()
def test_recording_waits_for_nothing_in_the_step() -> None:
    step = CudaBackend(OperatorRecorder()).capture(
        lambda inputs: inputs["x"] * inputs["x"].sum().item(), SHAPE
    )
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        step(inputs_of(SHAPE, torch.device("cpu")))


@torch.inference_mode()
def test_a_graph_of_hpu_begins_where_the_work_before_it_was_launched(vendor: pytest.MonkeyPatch) -> None:
    choose_mode(vendor, is_lazy=True)
    inputs = inputs_of(SHAPE, torch.device("cpu"))
    step = HpuGraphBackend().capture(lambda inputs: inputs["x"] * 2, SHAPE)
    for _ in range(3):
        step(inputs)
    assert (calls()["mark_step"], calls()["capture"], calls()["replay"]) == (1, 1, 2)


@torch.inference_mode()
def test_a_graph_built_in_compile_only_mode_is_right_once_it_is_launched(
    vendor: pytest.MonkeyPatch,
) -> None:
    choose_mode(vendor, is_lazy=True)
    from habana_frameworks.torch.internal.bridge_config import env_setting

    cpu = torch.device("cpu")
    captured, written, inputs = Model(HpuGraphBackend(), cpu), Model(None, cpu), inputs_of(SHAPE, cpu)
    step = captured.step(SHAPE)
    refill(inputs, 1)
    with env_setting("PT_COMPILE_ONLY_MODE", True):
        garbage = step(inputs).clone()
    assert not any(store.any() for store in captured.stores), "nothing may have been launched"
    expected = written.step(SHAPE)(inputs)
    assert not torch.allclose(garbage, expected)
    torch.testing.assert_close(step(inputs), expected)


@pytest.mark.slow
def test_importing_graphs_loads_neither_siblings_nor_compiled_backends() -> None:
    code = (
        "import sys, graphs; "
        "bad = {'hpu_duo', 'kernels_ref', 'graphs.backends.compile', 'graphs.backends.cuda', "
        "'graphs.backends.hpu', 'triton', 'habana_frameworks'}; "
        "print(*sorted(bad & set(sys.modules)))"
    )
    root = Path(graphs.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""

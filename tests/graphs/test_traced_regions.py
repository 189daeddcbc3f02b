"""Compiled regions inside of a traced step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._python_dispatch import TorchDispatchMode

from graphs import BatchShape
from graphs.backends.compile import CompileBackend, cpu_compile_problem
from tests.graphs.small_step import SHAPE, SIZE, Inputs, inputs_of
from tests.tiers import EXHAUSTIVE


@pytest.fixture(autouse=True)
def as_in_a_step() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Seen(TorchDispatchMode):
    """Counts operators that reach torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


needs_compiler = pytest.mark.skipif(
    cpu_compile_problem() is not None, reason=f"inductor: {cpu_compile_problem()}"
)


@needs_compiler
@pytest.mark.parametrize(
    "region",
    [
        # Those three kinds are in "some of each", too.
        pytest.param(lambda x, store: (x + 1).sin(), id="new tensors", marks=EXHAUSTIVE),
        pytest.param(lambda x, store: x.view(2, 2), id="a view", marks=EXHAUSTIVE),
        pytest.param(lambda x, store: x, id="an argument", marks=EXHAUSTIVE),
        pytest.param(lambda x, store: (store.add_(x), x * 2)[1], id="a store that is written"),
        pytest.param(lambda x, store: (store.add_(x),)[1:], id="nothing"),
        pytest.param(lambda x, store: (x.t(), x + 1, x), id="some of each"),
    ],
)
def test_compiled_regions_return_what_they_would_with_the_compilers_wrappers(
    region: Callable[[Tensor, Tensor], Any],
) -> None:
    stores = torch.zeros(SIZE), torch.zeros(SIZE)
    backend = CompileBackend()
    compiled = backend.region(SHAPE, "region", region)
    step = backend.capture(lambda inputs: compiled(inputs["x"] * 1, stores[0]), SHAPE)
    for run in range(4):
        x = inputs_of(run)["x"]
        got, expected = step({"x": x}), region(x * 1, stores[1])
        for left, right in zip(
            *((r if isinstance(r, tuple) else (r,)) for r in (got, expected)), strict=True
        ):
            torch.testing.assert_close(left, right)
        torch.testing.assert_close(stores[0], stores[1])


@needs_compiler
def test_after_their_first_call_regions_are_entered_past_the_compilers_wrappers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = CompileBackend().region(SHAPE, "region", lambda x, store: (store.add_(x), x * 2)[1])
    store, x = torch.zeros(SIZE), torch.ones(SIZE)
    compiled(x, store)
    monkeypatch.setattr(CompiledFxGraph, "__call__", None)
    assert torch.equal(compiled(x, store), 2 * x)
    assert torch.equal(store, 2 * x)


@needs_compiler
def test_regions_keep_their_default_arguments_past_the_compilers_checks() -> None:
    def scaled(x: Tensor, factor: int = 2, *, added: int = 1) -> Tensor:
        return x * factor + added

    compiled, x = CompileBackend().region(SHAPE, "region", scaled), torch.ones(SIZE)
    for _ in range(3):
        assert torch.equal(compiled(x), 3 * x)


@needs_compiler
def test_a_region_that_is_first_called_while_its_step_is_traced_is_compiled_as_usual() -> None:
    backend, store = CompileBackend(), torch.zeros(SIZE)
    region = backend.region(SHAPE, "region", lambda x, store: (store.add_(x), x * 2)[1])
    num_runs = 0

    def fn(inputs: Inputs) -> Tensor:
        nonlocal num_runs
        num_runs += 1
        return region(inputs["x"], store) if num_runs > 1 else inputs["x"] * 2

    step = backend.capture(fn, SHAPE)
    for run in range(4):
        x = inputs_of(run)["x"]
        assert torch.equal(step({"x": x}), 2 * x)
    torch.testing.assert_close(store, sum(inputs_of(run)["x"] for run in range(1, 4)))


@needs_compiler
def test_first_calls_in_two_threads_leave_torch_as_it_was() -> None:
    call = CompiledFxGraph.__call__
    backend = CompileBackend()
    shapes = [BatchShape.parse(f"c--/q{q}/s0/u0/l1") for q in (1, 2)]
    regions = [backend.region(shape, "region", lambda x: x * 2) for shape in shapes]
    with ThreadPoolExecutor(2) as threads:
        for result in threads.map(lambda region: region(torch.ones(SIZE)), regions):
            assert torch.equal(result, 2 * torch.ones(SIZE))
    assert CompiledFxGraph.__call__ is call


@needs_compiler
def test_a_region_is_one_call_of_the_list() -> None:
    backend, python_runs = CompileBackend(), 0

    def region(x: Tensor) -> Tensor:
        return (x + 1).sin().cos()

    compiled = backend.region(SHAPE, "region", region)

    def fn(inputs: Inputs) -> Tensor:
        nonlocal python_runs
        python_runs += 1
        return compiled(inputs["x"] * 3) * 2

    step = backend.capture(fn, SHAPE)
    x = torch.rand(SIZE)
    for _ in range(3):
        torch.testing.assert_close(step({"x": x}), region(x * 3) * 2)
    with Seen() as seen:
        step({"x": x})
    assert [name for name in seen.names if name.startswith("mul")] == ["mul.Tensor"] * 2
    assert not {"add.Tensor", "sin.default", "cos.default"} & {*seen.names}, (
        "the compiler's code has no such calls"
    )
    assert python_runs == 2


@pytest.mark.parametrize("options", [{"guards": True}, {"compiler": "eager"}])
def test_steps_whose_regions_are_checked_are_not_replayed(options: dict[str, Any]) -> None:
    num_runs = 0

    def fn(inputs: Inputs) -> Tensor:
        nonlocal num_runs
        num_runs += 1
        return inputs["x"] + 1

    step = CompileBackend(**options).capture(fn, SHAPE)
    for _ in range(3):
        step({"x": torch.ones(1)})
    assert num_runs == 3

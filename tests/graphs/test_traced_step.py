"""Steps that are traced and replayed, against the steps themselves."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphs.backends.replay import ReplayBackend, TracedStep, call_compiled, results_unused
from tests.graphs.small_step import SHAPE, SIZE, Inputs, inputs_of


@pytest.fixture(autouse=True)
def as_in_a_step() -> Iterator[None]:
    with torch.inference_mode():
        yield


def put(store: Tensor, value: Tensor) -> Tensor:
    store.index_copy_(0, torch.tensor([1, 3]), value[:2])
    return value


def count(x: Tensor) -> Tensor:
    made = torch.tensor([1.0, 2.0, 3.0, 4.0])  # made of numbers, and then written to
    made += x
    return made


def add_in_place(a: Tensor, store: Tensor) -> Tensor:
    torch._foreach_add_([store], [a])  # returns nothing
    return a


OPERATIONS: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
    lambda a, b, store: a + b,
    lambda a, b, store: torch.cat([a, b])[2:6],
    lambda a, b, store: a.view(2, 2).t().reshape(-1),
    lambda a, b, store: torch.stack((a, b)).max(dim=0).values,
    lambda a, b, store: torch.stack(torch.stack((a, b)).unbind()[::-1]).sum(0),
    lambda a, b, store: a.clone().mul_(b),
    lambda a, b, store: torch.where(a > b, a, -torch.inf).clamp(min=b.min()),
    lambda a, b, store: a.split([1, 3])[1].sum() + b,
    lambda a, b, store: put(store, a),
    lambda a, b, store: store + a,
    lambda a, b, store: count(a),
    lambda a, b, store: add_in_place(a, store),
    lambda a, b, store: (call_compiled(lambda tensors: [store.add_(tensors.pop())][:0], (a,)), b)[1],
    lambda a, b, store: a[torch.argsort(b)],
    lambda a, b, store: torch.nn.functional.linear(a, store[None].expand(SIZE, SIZE)),
    lambda a, b, store: call_compiled(lambda tensors: [tensors.pop() - tensors.pop()], (a, b))[0],
    lambda a, b, store: (a * b) + (a * b),
    lambda a, b, store: a[:].view(2, 2)[:, 1:].flatten().repeat(2),
    lambda a, b, store: torch.stack((a, b)).transpose(0, 1)[1:3].reshape(-1),
    lambda a, b, store: (store.view(2, 2).t()[1].add_(1), store + b)[1],
    lambda a, b, store: (a.view(2, 2)[0].mul_(2), a * 1)[1],
)


@given(
    program=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8
    ),
    returned=st.lists(st.integers(0, 9), min_size=1, max_size=3),
)
def test_a_replay_does_what_the_step_does(
    program: list[tuple[Callable[..., Tensor], int, int]], returned: list[int]
) -> None:
    num_runs = 0

    def step_with(store: Tensor) -> Callable[[Inputs], list[Tensor]]:
        def step(inputs: Inputs) -> list[Tensor]:
            nonlocal num_runs
            num_runs += 1
            values = [*inputs.values()]
            for operation, a, b in program:
                values.append(operation(values[a % len(values)], values[b % len(values)], store))
            return [values[-1], *(values[i % len(values)] for i in returned)]

        return step

    with torch.inference_mode():
        stores = torch.ones(SIZE), torch.ones(SIZE)
        traced, plain = (step_with(store) for store in stores)
        traced = TracedStep(traced)
        for run in range(4):
            expected, got = plain(inputs_of(run)), traced(inputs_of(run))
            for left, right in zip(expected, got, strict=True):
                torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(*stores)
    assert traced.is_replayed
    assert num_runs == 4 + 1


def test_effects_happen_once_in_each_run() -> None:
    store = torch.zeros(SIZE)
    step = TracedStep(lambda inputs: store.add_(inputs["x"]).sum())
    for run in range(1, 5):
        assert step({"x": torch.ones(SIZE)}).item() == run * SIZE


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x: x + 1 if x.sum().item() > 0 else x - 1, id="item"),
        pytest.param(lambda x: x + 1 if torch.equal(x, x.abs()) else x - 1, id="equal"),
        pytest.param(lambda x: x + torch.tensor(x.tolist()), id="tolist"),
        pytest.param(lambda x: x + torch.from_numpy(x.numpy()), id="numpy"),
        pytest.param(lambda x: x + (x > 0).nonzero().shape[0], id="nonzero"),
        pytest.param(lambda x: x + x[x > 0].numel(), id="mask"),
        pytest.param(lambda x: x + len(torch.unique(x)), id="unique"),
        pytest.param(lambda x: copy.deepcopy(x) * 2, id="deepcopy"),
        pytest.param(lambda x: copy.deepcopy(x * 2), id="deepcopy of the result"),
        pytest.param(lambda x: {"result": x + 1}, id="a dictionary"),
    ],
)
def test_a_step_that_cannot_be_traced_runs_as_it_is(fn: Callable[[Tensor], Any]) -> None:
    step = TracedStep(lambda inputs: fn(inputs["x"]))
    for sign in (1, 1, 1, -1, 1):
        x = torch.tensor([sign, 2 * sign, 3, 3])
        got, expected = step({"x": x}), fn(x)
        if isinstance(got, dict):
            got, expected = got["result"], expected["result"]
        assert torch.equal(got, expected)
    assert not step.is_replayed


def test_runs_that_compile_are_not_traced() -> None:
    num_runs = 0

    def fn(inputs: Inputs) -> Tensor:
        nonlocal num_runs
        num_runs += 1
        return inputs["x"] + 1

    step, x = TracedStep(fn, num_untraced=2), torch.ones(SIZE)
    for run in range(5):
        assert step.is_replayed == (run > 2)
        assert torch.equal(step({"x": x * run}), x * run + 1)
    assert num_runs == 3


def test_only_steps_on_a_cpu_are_traced() -> None:
    step = TracedStep(lambda inputs: inputs["x"] + 1)
    for _ in range(3):
        assert step({"x": torch.ones(SIZE, device="meta")}).shape == (SIZE,)
    assert not step.is_replayed


def test_one_tensor_under_two_names_is_not_taken_for_two() -> None:
    step = TracedStep(lambda inputs: inputs["x"] - inputs["y"])
    same = torch.ones(SIZE)
    for x, y in ((same, same), (same, same), (same, 2 * same), (2 * same, same)):
        assert torch.equal(step({"x": x, "y": y}), x - y)


def test_a_trace_is_freed_with_its_step() -> None:
    weight = torch.ones(SIZE)
    step = TracedStep(lambda inputs, weight=weight: inputs["x"] * weight)
    for _ in range(3):
        step({"x": torch.ones(SIZE)})
    assert step.is_replayed
    alive = weakref.ref(weight)
    gc.disable()
    try:
        del step, weight
        assert alive() is None
    finally:
        gc.enable()


def test_a_step_that_fails_while_it_is_traced_is_traced_later() -> None:
    may_fail = [True, False]

    def fn(inputs: Inputs) -> Tensor:
        if may_fail.pop(0):
            raise RuntimeError("no memory")
        return inputs["x"] + 1

    step, x = TracedStep(fn), torch.ones(SIZE)
    with pytest.raises(RuntimeError, match="no memory"):
        step({"x": x})
    assert not step.is_replayed
    assert torch.equal(step({"x": x}), x + 1)
    assert step.is_replayed
    assert torch.equal(step({"x": 2 * x}), 2 * x + 1)


def test_failing_compiled_code_leaves_the_trace_in_order() -> None:
    is_failing = [True, False]

    def code(tensors: list[Tensor]) -> list[Tensor]:
        if is_failing and is_failing.pop(0):
            raise RuntimeError("no memory")
        return [tensors[0] * 2]

    step, x = TracedStep(lambda inputs: call_compiled(code, (inputs["x"],))[0] + 1), torch.ones(SIZE)
    with pytest.raises(RuntimeError, match="no memory"):
        step({"x": x})
    assert torch.equal(step({"x": x}), 2 * x + 1)
    assert torch.equal(step({"x": 2 * x}), 4 * x + 1)
    assert step.is_replayed


@pytest.mark.slow
def test_intermediates_are_freed_as_soon_as_they_are_read_for_the_last_time() -> None:
    made: list[weakref.ref[Tensor]] = []

    def watched(tensors: list[Tensor]) -> list[Tensor]:
        gc.collect()
        assert all(each() is None for each in made), "what the call before this one returned has been read"
        made.clear()
        result = tensors.pop() + 1
        made.append(weakref.ref(result))
        return [result]

    def fn(inputs: Inputs) -> Tensor:
        x = inputs["x"]
        for _ in range(3):
            x = call_compiled(watched, (x,))[0]
            x = x * 2
        return x

    step = TracedStep(fn)
    for run in range(4):
        x = torch.full((SIZE,), float(run))
        assert torch.equal(step({"x": x}), 8 * x + 14)
        made.clear()
    assert step.is_replayed


class Layer(torch.nn.Module):
    """A layer with a weight, a store that it writes to, and a number that Python code branches on."""

    store: Tensor

    def __init__(self, number: int, is_odd: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((SIZE,), 1.0 + number))
        self.register_buffer("store", torch.zeros(SIZE))
        self.last = torch.nn.Identity()
        self.is_odd, self.num_calls = is_odd, 0


def run_layer(layer: Layer, x: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
    layer.num_calls += 1
    layer.store.add_(x)
    y = x * layer.weight - (0.5 if layer.is_odd else torch.tensor([2.0, 1.0, 1.0, 2.0]))
    return layer.last(y.view(2, 2).t().reshape(-1) * waves[0] + layer.store)


@pytest.mark.parametrize("odd", [None, 1, 3])
def test_a_region_is_traced_once_for_all_layers_unless_the_second_one_differs(odd: int | None) -> None:
    layers = [Layer(number, number == odd) for number in range(5)]
    plain = copy.deepcopy(layers)
    backend = ReplayBackend()
    regions = [backend.region(SHAPE, layer.is_odd if odd == 3 else "layer", run_layer) for layer in layers]

    def step(inputs: Inputs, layers: list[Layer], regions: list[Any]) -> Tensor:
        x, waves = inputs["x"], (inputs["x"].cos(), inputs["x"].sin())
        for layer, region in zip(layers, regions):
            x = region(layer, x, waves)
        return x

    traced = backend.capture(lambda inputs: step(inputs, layers, regions), SHAPE)
    for seed in range(3):
        inputs = inputs_of(seed)
        assert torch.equal(traced(inputs), step(inputs, plain, [run_layer] * 5))
        assert all(torch.equal(ours.store, theirs.store) for ours, theirs in zip(layers, plain))
    num_traced = {None: [1, 1, 0, 0, 0], 1: [1] * 5, 3: [1, 1, 0, 1, 0]}[odd]
    assert [layer.num_calls for layer in layers] == num_traced
    assert traced.is_replayed


def test_a_step_of_padding_does_not_run_the_layers_whose_operators_are_known() -> None:
    layers, backend = [Layer(number) for number in range(5)], ReplayBackend()
    plain = copy.deepcopy(layers)
    regions = [backend.region(SHAPE, "layer", run_layer) for _ in layers]

    def step(inputs: Inputs, layers: list[Layer], runs: Sequence[Any]) -> Tensor:
        x, waves = inputs["x"], (inputs["x"].cos(), inputs["x"].sin())
        for layer, run in zip(layers, runs):
            x = run(layer, x, waves)
        return x

    traced = backend.capture(lambda inputs: step(inputs, layers, regions), SHAPE)
    before = [layer.store.clone() for layer in layers]
    with results_unused():
        traced(inputs_of(0))
    assert [torch.equal(layer.store, was) for layer, was in zip(layers, before)] == [False] * 2 + [True] * 3
    for layer, was in zip(layers, before):
        layer.store.copy_(was)
    for seed in range(3):
        assert torch.equal(traced(inputs_of(seed)), step(inputs_of(seed), plain, [run_layer] * 5))


@pytest.mark.parametrize("how", ["hook", "forward"])
def test_a_module_that_runs_more_than_its_class_is_always_traced(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, backend = [Layer(number) for number in range(5)], ReplayBackend()
    regions = [backend.region(SHAPE, "layer", run_layer) for _ in layers]
    if how == "hook":
        layers[3].last.register_forward_hook(lambda module, args, output: output * 3)
    else:
        monkeypatch.setattr(layers[3].last, "forward", lambda x: x * 3)

    def step(inputs: Inputs, runs: Sequence[Any]) -> Tensor:
        x, waves = inputs["x"], (inputs["x"].cos(), inputs["x"].sin())
        for layer, run in zip(layers, runs):
            layer.store.zero_()
            x = run(layer, x, waves)
        return x

    traced = backend.capture(lambda inputs: step(inputs, regions), SHAPE)
    for seed in range(2):
        assert torch.equal(traced(inputs_of(seed)), step(inputs_of(seed), [run_layer] * 5))

"""Captured steps may not change, and their results do not last."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from graphs import BatchShape
from graphs.backends.compile import cut_at
from hpu_duo.lab import sim
from hpu_duo.lab.sim import HpuRuleViolation, Rule

SHAPE = BatchShape.parse("--u/q4/s0/u0/l4")


@pytest.fixture
def backend(simulated_hpu: sim.SimulatedHpu) -> sim.SimBackend:
    return sim.SimBackend(simulated_hpu)


def inputs_of(values: float) -> dict[str, Tensor]:
    return {"x": torch.full((4,), float(values), device="hpu")}


def test_a_step_is_captured_once_and_runs_the_same_operators_ever_after(backend: sim.SimBackend) -> None:
    step = backend.capture(lambda inputs: inputs["x"] * 2 + 1, SHAPE)
    inputs = inputs_of(3)
    with sim.watch() as seen:
        for _ in range(3):
            step(inputs)
    report = seen.report()
    assert (report.new_graphs, report.new_recipes, report.operators) == (1, 0, 6)
    assert report.graph_runs == {str(SHAPE): 3}


def test_a_replay_overwrites_what_the_one_before_it_returned(backend: sim.SimBackend) -> None:
    step = backend.capture(lambda inputs: inputs["x"] * 2, SHAPE)
    inputs = inputs_of(3)
    first = step(inputs)
    assert first.tolist() == [6] * 4
    inputs["x"].fill_(5)
    assert step(inputs) is first
    assert first.tolist() == [10] * 4


@pytest.mark.parametrize("name", ["a scalar per step", "a size per step", "one operator more"])
def test_a_step_that_changes_from_run_to_run_is_caught(backend: sim.SimBackend, name: str) -> None:
    runs = 0

    def fn(inputs: Mapping[str, Tensor]) -> Tensor:
        nonlocal runs
        runs += 1
        match name:
            case "a scalar per step":
                return inputs["x"] + runs
            case "a size per step":
                return inputs["x"][:runs] * 2
            case _:
                return inputs["x"] * 2 if runs == 1 else inputs["x"] * 2 + 1

    step, inputs = backend.capture(fn, SHAPE), inputs_of(1)
    step(inputs)
    with pytest.raises(HpuRuleViolation, match=r"operator [01] of [12]") as caught:
        step(inputs)
    assert caught.value.rule is Rule.GRAPH_CHANGED
    assert caught.value.operator == str(SHAPE)


def test_inputs_at_other_addresses_are_caught(backend: sim.SimBackend) -> None:
    step = backend.capture(lambda inputs: inputs["x"] * 2, SHAPE)
    first, second = inputs_of(1), inputs_of(1)
    step(first)
    with pytest.raises(HpuRuleViolation, match="inputs have moved: x"):
        step(second)


@pytest.mark.parametrize("name", ["a value is read", "a tensor is read back", "a tensor is made on the host"])
def test_the_host_has_no_part_in_a_captured_step(backend: sim.SimBackend, name: str) -> None:
    def fn(inputs: Mapping[str, Tensor]) -> Tensor:
        x = inputs["x"]
        match name:
            case "a value is read":
                return x * 2 if x[0] > 0 else x
            case "a tensor is read back":
                return x.cpu()
            case _:
                return x + torch.tensor([1.0] * 4, device=x.device)

    with pytest.raises(HpuRuleViolation) as caught:
        backend.capture(fn, SHAPE)(inputs_of(1))
    assert caught.value.rule is Rule.HOST_IN_GRAPH
    assert __file__ in caught.value.source


def test_a_step_of_too_many_operators_is_refused(simulated_hpu: sim.SimulatedHpu) -> None:
    backend = sim.SimBackend(simulated_hpu, most_operators=3)
    for num, is_fine in ((3, True), (4, False)):
        step = backend.capture(lambda inputs, num=num: [inputs["x"] + i for i in range(num)], SHAPE)
        if is_fine:
            assert len(step(inputs_of(1))) == num
            continue
        with pytest.raises(HpuRuleViolation, match="at most 3 operators in a step, got 4") as caught:
            step(inputs_of(1))
        assert caught.value.rule is Rule.GRAPH_SIZE
        assert caught.value.operator == str(SHAPE)


@pytest.mark.parametrize("num_later", [1, 2])
def test_a_graph_is_cut_at_an_operator_whose_places_are_part_of_it(
    backend: sim.SimBackend, num_later: int
) -> None:
    """In its place the host may read and write; elsewhere in the graph it may not."""
    library = torch.library.Library("hpu_duo_cut_test", "FRAGMENT")
    library.define("meet(Tensor x) -> Tensor")
    library.impl("meet", lambda x: x, "CompositeExplicitAutograd")
    operator = torch.ops.hpu_duo_cut_test.meet.default
    cut_at(operator, lambda x: (x.cpu() + 1).to("hpu"))
    counts = iter([1, 1, num_later])

    def fn(inputs: Mapping[str, Tensor]) -> Tensor:
        x = inputs["x"] * 2
        for _ in range(next(counts)):
            x = operator(x)
        return x * 2

    step, inputs = backend.capture(fn, SHAPE), inputs_of(3)
    with sim.watch() as seen:
        assert step(inputs).tolist() == step(inputs).tolist() == [14] * 4
        if num_later == 1:
            step(inputs)
        else:
            with pytest.raises(HpuRuleViolation, match=Rule.GRAPH_CHANGED.value):
                step(inputs)
    assert seen.report().new_graphs == 1
    with pytest.raises(HpuRuleViolation, match=Rule.HOST_IN_GRAPH.value):
        backend.capture(lambda inputs: inputs["x"].cpu(), SHAPE)(inputs)

"""The shadow of operators notices what the device computes otherwise than the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpu_duo.lab.selftest.finding import Notes
from hpu_duo.lab.selftest.operators import OperatorShadow


@pytest.fixture
def shadow(tmp_path: Path) -> OperatorShadow:
    """The CPU stands for the device, so every operator computes the same twice."""
    return OperatorShadow("cpu", Notes(tmp_path / "notes.jsonl"))


def test_right_operators_have_no_problem(shadow: OperatorShadow) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with shadow:
        y = x @ x.T
        y.add_(1.0)
        store = torch.zeros(5, 3)
        store.index_copy_(0, torch.tensor([4, 1]), y[:2])
        torch.argmax(y)
    assert {name for name in shadow.records if "index_copy_" in name or "mm" in name or "add_" in name}
    assert all(record.problem is None for record in shadow.records.values())


def test_each_shape_is_compared_once(shadow: OperatorShadow) -> None:
    with shadow:
        for size in (2, 2, 3):
            torch.ones(size).exp()
    assert shadow.records["aten.exp.default"].num_variants == 2


def test_a_result_that_differs_is_found(shadow: OperatorShadow) -> None:
    with shadow:
        # Two draws are not the same: as good as an operator that is wrong on one side.
        torch.bernoulli(torch.full((64,), 0.5))
        torch.zeros(64).normal_()
    wrong = {name for name, record in shadow.records.items() if record.problem is not None}
    assert wrong == {"aten.bernoulli.default", "aten.normal_.default"}


def test_an_operator_without_an_answer_on_the_cpu_is_a_problem(shadow: OperatorShadow) -> None:
    library = torch.library.Library("selftest_probe", "DEF")
    library.define("once(Tensor x) -> Tensor")
    calls: list[int] = []

    def once(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise NotImplementedError("no kernel here")
        return x.clone()

    library.impl("once", once, "CPU")
    with shadow:
        torch.ops.selftest_probe.once(torch.ones(2))
    problem = shadow.records["selftest_probe.once.default"].problem
    assert problem == "cannot be run on the CPU to compare: NotImplementedError: no kernel here"


def test_not_a_number_is_equal_to_itself_and_to_nothing_else(shadow: OperatorShadow) -> None:
    with shadow:
        torch.tensor([float("nan"), float("inf"), 1.0]).mul(2.0)
    assert shadow.records["aten.mul.Tensor"].problem is None

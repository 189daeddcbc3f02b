"""Steps whose products with the same inputs are joined, against the same steps as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from graphs.backends.replay import TracedStep
from graphs.backends.trace import Call
from hpu_duo.modeling.packed_linear import join_linears
from kernels_ref.x86 import linear
from kernels_ref.x86.library import is_supported

pytestmark = pytest.mark.skipif(not is_supported(), reason="needs a CPU with AVX512-BF16")

Inputs = Mapping[str, Tensor]
INPUTS, SIZES = 64, (70, 32, 32)
ONE, EACH = "hpu_duo_x86_v3.linear.default", "hpu_duo_x86_v3.linears.n{}"
FAMILY = "hpu_duo_x86_v3.linear"


@pytest.fixture(autouse=True)
def as_in_a_step() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def weights() -> list[Tensor]:
    return [linear.pack(torch.randn(size, INPUTS).bfloat16()) for size in SIZES]


def products(calls: Sequence[Call]) -> list[str]:
    return [str(call.func) for call in calls if str(call.func).startswith(FAMILY)]


def check(fn: Callable[[Inputs], Any]) -> list[str]:
    """Run a step three times beside itself untraced; returns its products when they are joined."""
    found: list[list[str]] = []

    def arrange(calls: Sequence[Call], _: object) -> list[Call]:
        joined = join_linears(calls)
        found.append(products(joined))
        return joined

    step = TracedStep(fn, arrange)
    for run in range(3):
        inputs = {"x": torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(run)).bfloat16()}
        for got, expected in zip(step(inputs), fn(inputs), strict=True):
            assert torch.equal(got, expected)
    assert step.is_replayed
    return found[0]


def test_products_with_the_same_inputs_are_one_call(weights: list[Tensor]) -> None:
    live = torch.tensor([5, 3], dtype=torch.int32)

    def fn(inputs: Inputs) -> list[Tensor]:
        x = inputs["x"] * 2
        q, k, v = (linear.multiply(x, weight, None, size, live) for weight, size in zip(weights, SIZES))
        return [q.view(5, 2, 35).transpose(0, 1) + 1, k * 3, v]

    assert check(fn) == [EACH.format(3)]


def test_biases_stay_with_their_weights(weights: list[Tensor]) -> None:
    bias = linear.pack_bias(torch.randn(SIZES[1]))

    def fn(inputs: Inputs) -> list[Tensor]:
        return [
            linear.multiply(inputs["x"], weights[0], None, SIZES[0]),
            linear.multiply(inputs["x"], weights[1], bias, SIZES[1]),
        ]

    assert check(fn) == [EACH.format(2)]


def test_more_products_than_one_call_has_are_several_calls(weights: list[Tensor]) -> None:
    def fn(inputs: Inputs) -> list[Tensor]:
        return [linear.multiply(inputs["x"], weights[1], None, size) for size in range(1, 10)]

    assert check(fn) == [EACH.format(8), ONE]


def test_products_with_other_inputs_or_other_padding_stay_apart(weights: list[Tensor]) -> None:
    live = torch.tensor([5, 3], dtype=torch.int32)

    def fn(inputs: Inputs) -> list[Tensor]:
        x = inputs["x"]
        return [
            linear.multiply(x, weights[0], None, SIZES[0]),
            linear.multiply(x, weights[1], None, SIZES[1], live),
            linear.multiply(x + 1, weights[2], None, SIZES[2]),
        ]

    assert check(fn) == [ONE, ONE, ONE]


def test_inputs_that_are_written_to_in_between_are_read_before_and_after(weights: list[Tensor]) -> None:
    def fn(inputs: Inputs) -> list[Tensor]:
        x = inputs["x"] + 1
        before = linear.multiply(x, weights[0], None, SIZES[0])
        x.mul_(2)
        return [before, linear.multiply(x, weights[1], None, SIZES[1])]

    assert check(fn) == [ONE, ONE]


def test_a_weight_that_the_step_makes_is_not_read_before_it_is_there(weights: list[Tensor]) -> None:
    def fn(inputs: Inputs) -> list[Tensor]:
        before = linear.multiply(inputs["x"], weights[0], None, SIZES[0])
        return [before, linear.multiply(inputs["x"], weights[1] * 2, None, SIZES[1])]

    assert check(fn) == [ONE, ONE]

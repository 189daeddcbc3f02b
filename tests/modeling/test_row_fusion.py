"""Steps whose small operators are fused, against the same steps as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphs.backends.replay import ReplayBackend, TracedStep
from graphs.backends.trace import Call
from hpu_duo.modeling.row_fusion import fuse_rows
from kernels_ref import rowwise

pytestmark = pytest.mark.skipif(not rowwise.is_available(), reason="the interpreter cannot be built here")

ROWS, HEADS, SIZE = 5, 3, 16
Inputs = Mapping[str, Tensor]


@pytest.fixture(autouse=True)
def as_in_a_step() -> Iterator[None]:
    with torch.inference_mode():
        yield


def fusing(calls: list[list[Call]]) -> Callable[[Sequence[Call], Any], list[Call]]:
    """``fuse_rows`` that notes what it returns."""

    def fuse(trace: Sequence[Call], outputs: Any) -> list[Call]:
        calls.append(fuse_rows(trace, outputs))
        return calls[-1]

    return fuse


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """As most families of transformers write it."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotary embedding, as most families of transformers write it."""
    half = torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)
    return x * cos + half * sin


def names(calls: Sequence[Call]) -> list[str]:
    return [str(call.func) for call in calls]


def check(fn: Callable[[Inputs], Any], make_inputs: Callable[[int], dict[str, Tensor]]) -> list[str]:
    """Run a step four times beside itself untraced; returns the names of the calls that are left."""
    calls: list[list[Call]] = []
    step = TracedStep(fn, fusing(calls))
    for run in range(4):
        inputs = make_inputs(run)
        torch.testing.assert_close(step(inputs), fn(inputs), rtol=2e-2, atol=1e-2)
    assert step.is_replayed
    return names(calls[0])


def draw(run: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(run)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 70])
def test_a_residual_and_the_norm_behind_it_are_one_call(dtype: torch.dtype, num_rows: int) -> None:
    weight = draw(9, 64, dtype=dtype)

    def fn(inputs: Inputs) -> list[Tensor]:
        residual = inputs["x"] + inputs["y"]
        return [residual, norm(residual, weight)]

    calls = check(fn, lambda run: {n: draw(run, 1, num_rows, 64, dtype=dtype) for n in ("x", "y")})
    assert calls == ["hpu_duo_rowwise_v2.run.i3o2"]


@pytest.mark.parametrize("num_rows", [1, 7])
def test_a_rotary_embedding_of_heads_is_one_call(num_rows: int) -> None:
    def fn(inputs: Inputs) -> Tensor:
        q = inputs["q"].view(1, num_rows, HEADS, 32).transpose(1, 2)
        return turn(q, inputs["cos"][:, None], inputs["sin"][:, None])

    def make(run: int) -> dict[str, Tensor]:
        angles = draw(run, 1, num_rows, 32, dtype=torch.float32)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        return {"q": draw(run, 1, num_rows, HEADS * 32), "cos": cos, "sin": sin}

    assert check(fn, make) == ["hpu_duo_rowwise_v2.run.i3o1"]


def test_sums_of_few_heads_join_the_rows_that_they_are_of() -> None:
    def fn(inputs: Inputs) -> Tensor:
        index = inputs["index"].clamp(max=2)
        exists = (inputs["index"] < 3)[:, None, None]
        attn, total = (inputs[name].index_select(0, index) for name in ("attn", "sum"))
        attn = torch.where(exists[..., None], attn, 0.0)
        total = torch.where(exists, total, 0.0).clamp(min=1e-30)
        return (attn / total[..., None]).to(torch.bfloat16)

    def make(run: int) -> dict[str, Tensor]:
        index = torch.arange(ROWS, dtype=torch.int32).add(run).remainder(4).int()
        attn = draw(run, 3, HEADS, 2, SIZE, dtype=torch.float32)
        return {"attn": attn, "sum": attn.abs().sum(-1), "index": index}

    assert sum(call.startswith("hpu_duo_rowwise_v2.run.") for call in check(fn, make)) == 1


def test_what_reads_a_store_before_it_is_written_is_not_put_behind_the_write() -> None:
    store = torch.zeros(4, SIZE)

    def fn(inputs: Inputs) -> Tensor:
        before = (store * 2 + 1).exp()
        store.add_(inputs["x"])
        return before + store * 3

    expected_store = torch.zeros(4, SIZE)
    step = TracedStep(fn, fuse_rows)
    for run in range(4):
        x = draw(run, 4, SIZE, dtype=torch.float32) / 8
        expected = (expected_store * 2 + 1).exp()
        expected_store += x
        torch.testing.assert_close(step({"x": x}), expected + expected_store * 3)
    assert step.is_replayed


def test_a_result_that_is_written_to_later_is_memory_of_its_own() -> None:
    def fn(inputs: Inputs) -> list[Tensor]:
        x = inputs["x"]
        copy = (x * 2).clone()
        copy[0] = 7
        return [copy, x * 2]

    check(fn, lambda run: {"x": draw(run, 4, SIZE, dtype=torch.float32)})


def same(values: list[Tensor], a: int, b: int) -> tuple[Tensor, Tensor]:
    """Two values that broadcast."""
    left, right = values[a % len(values)], values[b % len(values)]
    try:
        torch.broadcast_shapes(left.shape, right.shape)
    except RuntimeError:
        right = left
    return left, right


Operation = Callable[[Tensor, Tensor, Tensor], Tensor]
OPERATIONS: tuple[Operation, ...] = (
    lambda a, b, store: a + b,
    lambda a, b, store: a - b,
    lambda a, b, store: (a * b).clamp(-4, 4),
    lambda a, b, store: torch.maximum(a.float(), b.float()),
    lambda a, b, store: torch.nn.functional.silu(a),
    lambda a, b, store: a.sigmoid() * 0.5 + 1,
    lambda a, b, store: torch.where(a > 0, b, 0.25),
    lambda a, b, store: a.to(torch.bfloat16),
    lambda a, b, store: a.to(torch.float32),
    lambda a, b, store: a.float().mean(-1, keepdim=True),
    lambda a, b, store: a / a.float().pow(2).sum(-1, keepdim=True).add(1).sqrt(),
    lambda a, b, store: torch.cat((-a[..., a.shape[-1] // 2 :], a[..., : a.shape[-1] // 2]), dim=-1),
    lambda a, b, store: a.transpose(0, 1),
    lambda a, b, store: a.transpose(0, 1).contiguous().transpose(0, 1),
    lambda a, b, store: a[None][0],
    lambda a, b, store: a.flip(0),
    lambda a, b, store: a.index_select(0, torch.tensor([0] * len(a))),
    lambda a, b, store: a[1:].mul(2).sum(0, keepdim=True) + a,
    lambda a, b, store: (store.mul_(0.5), a + store[: a.shape[-1]].sum())[1],
    lambda a, b, store: a.clone().add_(1),
)


@settings(max_examples=150, deadline=None)
@given(
    program=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=14
    ),
    returned=st.lists(st.integers(0, 13), min_size=1, max_size=3),
    size=st.sampled_from([1, 2, 6, SIZE]),
    rows=st.sampled_from([1, ROWS]),
)
def test_any_mixture_of_operators_computes_what_it_would_one_by_one(
    program: list[tuple[Operation, int, int]], returned: list[int], size: int, rows: int
) -> None:
    def step_with(store: Tensor) -> Callable[[Inputs], list[Tensor]]:
        def step(inputs: Inputs) -> list[Tensor]:
            values = [*inputs.values()]
            for operation, a, b in program:
                values.append(operation(*same(values, a, b), store))
            return [values[-1], *(values[i % len(values)] for i in returned)]

        return step

    def make(run: int) -> dict[str, Tensor]:
        wide = draw(run, rows, HEADS, size, dtype=torch.float32)
        return {"x": wide, "y": draw(run + 9, rows, HEADS, size), "z": wide[:, :1, :1].contiguous()}

    with torch.inference_mode():
        stores = torch.ones(SIZE), torch.ones(SIZE)
        traced, plain = (step_with(store) for store in stores)
        traced = TracedStep(traced, fuse_rows)
        for run in range(4):
            inputs = make(run)
            for got, expected in zip(traced(inputs), plain(inputs), strict=True):
                assert got.dtype == expected.dtype
                torch.testing.assert_close(got, expected, rtol=3e-2, atol=3e-2, equal_nan=True)
            torch.testing.assert_close(*stores)
        assert traced.is_replayed


def test_other_devices_are_named() -> None:
    assert ReplayBackend().problem(torch.device("cpu")) is None
    assert (
        ReplayBackend().problem(torch.device("cuda", 0)) == "steps are replayed on device 'cpu', got 'cuda:0'"
    )

"""Fused elementwise programs against torch's own operators."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels_ref.rowwise import Builder, Code, Index, Rows, is_available
from tests.kernels_ref.row_cases import random, rows_of, run

needs_compiler = pytest.mark.skipif(not is_available(), reason="the interpreter cannot be built here")
pytestmark = [needs_compiler, pytest.mark.instruction_set]

FLOATS = (torch.float32, torch.bfloat16)
LEAST_NORMAL = torch.finfo(torch.bfloat16).tiny
UNARY: dict[Code, Callable[[Tensor], Tensor]] = {
    Code.COPY: torch.clone,
    Code.NEG: torch.neg,
    Code.ABS: torch.abs,
    Code.EXP: torch.exp,
    Code.LOG: torch.log,
    Code.SQRT: torch.sqrt,
    Code.RSQRT: torch.rsqrt,
    Code.RECIPROCAL: torch.reciprocal,
    Code.SIGMOID: torch.sigmoid,
    Code.TANH: torch.tanh,
    Code.SILU: torch.nn.functional.silu,
    Code.RELU: torch.relu,
    Code.GELU: torch.nn.functional.gelu,
    Code.GELU_TANH: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    Code.COS: torch.cos,
    Code.SIN: torch.sin,
}
BINARY: dict[Code, Callable[[Tensor, Tensor], Tensor]] = {
    Code.ADD: torch.add,
    Code.SUB: torch.sub,
    Code.MUL: torch.mul,
    Code.DIV: torch.div,
    Code.MAX: torch.maximum,
    Code.MIN: torch.minimum,
    Code.LESS: torch.lt,
    Code.LESS_EQUAL: torch.le,
    Code.GREATER: torch.gt,
    Code.GREATER_EQUAL: torch.ge,
    Code.EQUAL: torch.eq,
    Code.NOT_EQUAL: torch.ne,
}
REDUCTIONS: dict[Code, Callable[[Tensor], Tensor]] = {
    Code.SUM: lambda x: x.sum(-1, keepdim=True),
    Code.MEAN: lambda x: x.mean(-1, keepdim=True),
    Code.MEAN_OF_SQUARES: lambda x: x.square().mean(-1, keepdim=True),
    Code.AMAX: lambda x: x.amax(-1, keepdim=True),
}


def assert_same(got: Tensor, expected: Tensor) -> None:
    """To a few roundings of float32, and then rounded once; see ``torch.testing``."""
    assert got.shape == expected.shape
    rtol = 1e-5 if expected.dtype == torch.float32 else 8e-3
    torch.testing.assert_close(got, expected, rtol=rtol, atol=3e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("code", UNARY, ids=lambda code: code.name)
@pytest.mark.parametrize("width", [1, 16, 37, 300])
def test_every_function_of_one_operand(code: Code, dtype: torch.dtype, width: int) -> None:
    x = random(3, 40, width, dtype=dtype)
    assert_same(run((3, 40), [x], code, width, dtype), UNARY[code](x))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("code", BINARY, ids=lambda code: code.name)
@pytest.mark.parametrize("widths", [(19, 19), (19, 1), (1, 19), (1, 1), (64, 1), (1, 64)])
def test_every_function_of_two_operands(code: Code, dtype: torch.dtype, widths: tuple[int, int]) -> None:
    x, y = (random(70, width, dtype=dtype, seed=seed).round() for seed, width in enumerate(widths))
    expected = BINARY[code](x, y)
    assert_same(run((70,), [x, y], code, max(widths), expected.dtype), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("code", REDUCTIONS, ids=lambda code: code.name)
@pytest.mark.parametrize("width", [1, 9, 64, 1000])
def test_every_sum_over_rows(code: Code, dtype: torch.dtype, width: int) -> None:
    x = random(5, 7, width, dtype=dtype)
    expected = REDUCTIONS[code](x.double()).to(dtype)
    got = run((5, 7), [x], code, 1, dtype)
    torch.testing.assert_close(got, expected, rtol=8e-3 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)


@pytest.mark.parametrize("widths", [(33, 33, 33), (1, 33, 1), (33, 1, 33), (1, 1, 1)])
def test_a_choice_takes_hidden_values_as_they_are(widths: tuple[int, int, int]) -> None:
    tensors = [random(9, width, dtype=torch.float32, seed=seed) for seed, width in enumerate(widths)]
    condition, x, y = tensors[0] > 0, tensors[1], tensors[2]
    y[3] = math.nan
    got = run((9,), [condition, x, y], Code.WHERE, max(widths), torch.float32)
    assert_same(got, torch.where(condition, x, y).expand(9, max(widths)))


def test_rounding_is_that_of_torch_for_every_bfloat16_and_what_lies_between() -> None:
    halves = torch.arange(-32768, 32768, dtype=torch.int32) << 16
    bits = torch.stack([halves + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)], dim=1)
    x = bits.view(torch.float32)
    expected = x.to(torch.bfloat16)
    for got in (
        run((65536,), [x], Code.COPY, 6, torch.bfloat16),
        run((65536,), [x, torch.zeros(65536, 6)], Code.MAX, 6, torch.bfloat16)[x[:, 0] > 0],
    ):
        wanted = expected if len(got) == 65536 else expected[x[:, 0] > 0]
        assert torch.equal(got.isnan(), wanted.isnan())
        # The instruction that rounds to bfloat16 takes what is denormal for 0.
        is_same = (got == wanted) | ((wanted.abs() <= LEAST_NORMAL) & (got == 0))
        assert (is_same & (got.signbit() == wanted.signbit()))[~wanted.isnan()].all()


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.one_of(
        st.lists(st.integers(1, 5), min_size=1, max_size=4),
        st.lists(st.sampled_from([1, 3, 9, 40]), min_size=1, max_size=3),
    ),
    width=st.integers(1, 20),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from((*FLOATS, torch.bool)),
    out_dtype=st.sampled_from(FLOATS),
)
def test_rows_are_found_and_put_wherever_strides_say(
    sizes: list[int], width: int, order: object, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    shape = [*sizes, width]
    dims = list(range(len(shape)))
    order.shuffle(dims)  # type: ignore[attr-defined]
    back = [dims.index(d) for d in range(len(shape))]
    x = random(*(shape[d] for d in dims), dtype=torch.float32).to(dtype).permute(back)
    y = random(*shape, dtype=torch.float32)[:1].expand(shape)
    builder = Builder(sizes)
    total = builder.compute(
        Code.ADD, [builder.load(0, rows_of(x)), builder.load(1, rows_of(y))], width, out_dtype
    )
    builder.store(total, x.shape, x.stride(), replace_type(rows_of(x), out_dtype))
    (got,) = builder.build()([x, y])
    assert got.stride() == x.stride()
    assert torch.equal(got, (x.float() + y).to(out_dtype))


def replace_type(rows: Rows, dtype: torch.dtype) -> Rows:
    return Rows(dtype, rows.offset, rows.width, rows.step, rows.strides)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_rows", [1, 6])
def test_rows_are_chosen_by_an_index(dtype: torch.dtype, num_rows: int) -> None:
    x = random(4, 3, 10, dtype=torch.bfloat16)
    numbers = torch.arange(4 * num_rows, dtype=dtype).remainder(4).flip(0)
    index = numbers[2 : 2 + 2 * num_rows : 2]
    builder = Builder((num_rows, 3))
    chosen = Index(1, dtype, 2, 2, 0 if num_rows > 1 else -1, x.stride(0))
    loaded = builder.load(0, Rows(x.dtype, 0, 10, 1, (0, 10), chosen))
    like = torch.empty(num_rows, 3, 10, dtype=x.dtype, device="meta")
    builder.store(loaded, like.shape, like.stride(), rows_of(like))
    (got,) = builder.build()([x, numbers])
    assert torch.equal(got, x.index_select(0, index))


def test_parts_are_joined_and_registers_used_again() -> None:
    x = random(200, 32, dtype=torch.float32)
    builder = Builder((200,))
    whole = builder.load(0, rows_of(x))
    right = builder.load(0, Rows(x.dtype, 16, 16, 1, (32,)))
    left = builder.load(0, Rows(x.dtype, 0, 16, 1, (32,)))
    turned = builder.join([builder.compute(Code.NEG, [right], 16), left])
    total = whole
    for _ in range(20):
        total = builder.compute(
            Code.ADD, [total, builder.compute(Code.MUL, [turned, builder.constant(0.5)], 32)], 32
        )
    builder.store(total, x.shape, x.stride(), rows_of(x))
    (got,) = builder.build()([x])
    torch.testing.assert_close(got, x + 10 * torch.cat([-x[:, 16:], x[:, :16]], dim=1))


@pytest.mark.parametrize("num_rows", [1, 5, 200])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_rows_of_heads_are_read_and_written_where_they_lie(num_heads: int, num_rows: int) -> None:
    width, total = 32, num_heads * 32 + 7
    x = random(num_rows, total, dtype=torch.bfloat16)
    factor = random(num_rows, width, dtype=torch.bfloat16, seed=1)
    heads = Rows(x.dtype, 7, width, 1, (width, total))
    builder = Builder((num_heads, num_rows))
    product = builder.compute(
        Code.MUL,
        [builder.load(0, heads), builder.load(1, Rows(x.dtype, 0, width, 1, (0, width)))],
        width,
        x.dtype,
    )
    wide = builder.compute(Code.ADD, [product, product], width)
    shape = (num_heads, num_rows, width)
    apart = (width, num_heads * width)
    builder.store(product, shape, (*apart, 1), Rows(x.dtype, 0, width, 1, apart))
    builder.store(wide, shape, (*apart, 1), Rows(torch.float32, 0, width, 1, apart))
    builder.store(
        product, shape, (num_rows * width, width, 1), Rows(x.dtype, 0, width, 1, (num_rows * width, width))
    )
    first, second, third = builder.build()([x, factor])
    expected = x[:, 7:].view(num_rows, num_heads, width).transpose(0, 1) * factor
    assert torch.equal(first, expected)
    assert torch.equal(second, 2 * expected.float())
    assert torch.equal(third, expected)
    assert first.stride() == (*apart, 1)


@pytest.mark.parametrize("code", [Code.COPY, Code.NEG, Code.EXP, Code.SILU, Code.MEAN, Code.ADD, Code.MAX])
def test_one_number_for_a_row_is_rounded_before_others_read_it(code: Code) -> None:
    number, x = random(20, 1, dtype=torch.float32), random(20, 33, dtype=torch.float32, seed=1)
    builder = Builder((20,))
    loaded = [builder.load(0, rows_of(number))] * (2 if code in BINARY else 1)
    rounded = builder.compute(code, loaded, 1, torch.bfloat16)
    builder.store(
        builder.compute(Code.MUL, [rounded, builder.load(1, rows_of(x))], 33), x.shape, x.stride(), rows_of(x)
    )
    exact = {**UNARY, **REDUCTIONS}[code](number) if code not in BINARY else BINARY[code](number, number)
    torch.testing.assert_close(builder.build()([number, x])[0], exact.bfloat16().float() * x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_mean_of_squares_is_one_instruction_where_nobody_reads_the_squares(dtype: torch.dtype) -> None:
    x = random(9, 100, dtype=dtype)
    like = torch.empty(9, 1, device="meta")
    outputs = []
    for reads_squares in (False, True):
        builder = Builder((9,))
        loaded = builder.load(0, rows_of(x))
        squares = builder.compute(Code.MUL, [loaded, loaded], 100)
        builder.store(builder.compute(Code.MEAN, [squares], 1), like.shape, like.stride(), rows_of(like))
        if reads_squares:
            largest = builder.compute(Code.AMAX, [squares], 1)
            builder.store(largest, like.shape, like.stride(), rows_of(like))
        outputs.append(builder.build()([x])[0])
    torch.testing.assert_close(outputs[0], x.float().square().mean(-1, keepdim=True))
    torch.testing.assert_close(*outputs)


def test_no_rows_are_no_work() -> None:
    x = torch.empty(0, 5)
    assert run((0,), [x], Code.EXP, 5, x.dtype).shape == (0, 5)


def test_silu_of_extreme_values_is_that_of_torch() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 3e38, -3e38, 200.0, -200.0, -88.0, -0.0, 1e-30])
    x = x.to(torch.bfloat16).repeat(1, 4)
    assert_same(run((1,), [x], Code.SILU, 40, x.dtype), torch.nn.functional.silu(x))


def test_what_is_read_where_it_lies_is_left_as_it_is() -> None:
    x, y = (random(300, 48, dtype=torch.float32, seed=seed) for seed in range(2))
    before = x.clone(), y.clone()
    builder = Builder((300,))
    # More instructions than registers: the places of both operands are written to again.
    total = builder.compute(Code.ADD, [builder.load(0, rows_of(x)), builder.load(1, rows_of(y))], 48)
    for _ in range(3):
        total = builder.compute(Code.MUL, [total, builder.constant(2.0)], 48)
    builder.store(total, x.shape, x.stride(), rows_of(x))
    (got,) = builder.build()([x, y])
    assert torch.equal(got, 8 * (x + y))
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_cpus_with_fewer_instructions_compute_the_same(capability: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", __file__]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout

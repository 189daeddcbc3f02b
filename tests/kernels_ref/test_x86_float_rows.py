"""Decode rows of float32 queries against float64, and each number of lanes against the model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_ref.x86 import library as x86
from tests.kernels_ref.test_x86_rows import DIMS, exact, plan_of
from tests.needs import needs_x86_kernels

pytestmark = [
    needs_x86_kernels,
    pytest.mark.instruction_set,
]

STORES = (torch.bfloat16, torch.float16, torch.float32)
heads = st.sampled_from([(1, 1), (2, 3), (1, 4), (1, 7)])


def run(name: str, *args: object) -> list[list[torch.Tensor]]:
    """Results of an operator in each number of lanes, the model last."""
    assert x86.is_available(torch.float32)
    operator = getattr(torch.ops.hpu_duo_x86_v3, name).default
    return [list(operator(*args, x86.NUMBER_OF[name])) for name in x86.variants(torch.float32)]


def check_bits(found: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return results of the fewest lanes, which are those of the model; of more lanes nearly."""
    assert all(map(torch.equal, found[0], found[-1]))
    for other in found[1:-1]:
        for one, two in zip(found[0], other):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    return found[0]


@settings(deadline=None, max_examples=40)
@given(
    store=st.sampled_from(STORES),
    owner=st.lists(st.integers(0, 4), max_size=6),
    tails=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    heads=heads,
    dims=st.sampled_from(DIMS),
    slots=st.sampled_from([4, 16, 140]),
    seed=st.integers(0, 99),
)
def test_each_row_sees_its_units_and_the_head_of_its_tail_although_other_slots_hold_nan(
    store: torch.dtype,
    owner: list[int],
    tails: list[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    slots: int,
    seed: int,
) -> None:
    gen = torch.Generator().manual_seed(seed)
    num_rows, (num_kv, group), (dim, value_dim) = len(tails), heads, dims
    visible = [min(tail, slots) for tail in tails]
    q = torch.randn(num_rows, num_kv, group, dim, generator=gen) * 2 * dim**-0.5
    k, v = (torch.randn(len(owner) + num_rows, num_kv, slots, x, generator=gen).to(store) for x in dims)
    if dim == 576:
        v = k[..., :value_dim]
    for stored in (k, v):
        for row in range(num_rows):
            stored[len(owner) + row, :, visible[row] :] = torch.nan
    last = [len(owner) + row for row in range(num_rows)]
    attn, _, total = check_bits(run("attend_blocks", q, k, v, *plan_of(owner, last, visible)))
    for row in range(num_rows):
        units = [unit for unit, number in enumerate(owner) if number == row]
        keys, values = (
            torch.cat([*(x[unit] for unit in units), x[last[row], :, : visible[row]]], dim=1) for x in (k, v)
        )
        out = attn[row] / total[row].clamp(min=1e-30)[..., None]
        torch.testing.assert_close(out.double(), exact(q[row], keys, values), atol=5e-6, rtol=5e-6)


@settings(deadline=None, max_examples=30)
@given(
    store=st.sampled_from(STORES),
    tokens=st.integers(1, 3),
    heads=heads,
    is_per_head=st.booleans(),
    sink=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_each_token_sees_the_positions_of_its_interval_wherever_they_lie(
    store: torch.dtype, tokens: int, heads: tuple[int, int], is_per_head: bool, sink: int, seed: int
) -> None:
    gen = torch.Generator().manual_seed(seed)
    (num_kv, group), num_rows, slots = heads, 2, 140
    q = torch.randn(num_rows, num_kv, tokens, group, 64, generator=gen) / 8
    k, v = (torch.randn(num_rows, num_kv, slots, 64, generator=gen).to(store) for _ in range(2))
    shape = (num_rows, num_kv if is_per_head else 1, slots)
    position = torch.randint(-1, 200, shape, generator=gen, dtype=torch.int32)
    begin, end = torch.randint(0, 220, (2, num_rows, tokens), generator=gen, dtype=torch.int32)
    attn, _, total = check_bits(run("attend_held", q.flatten(2, 3), k, v, position, begin, end, sink))
    out = (attn / total.clamp(min=1e-30)[..., None]).unflatten(2, (tokens, group))
    for row, token, head in torch.cartesian_prod(*map(torch.arange, (num_rows, tokens, num_kv))).tolist():
        held = position[row, head if is_per_head else 0]
        first, last = int(begin[row, token]), int(end[row, token])
        seen = (held >= 0) & (held < last) & ((held >= first) | (held < sink))
        keys, values = (x[row, head, seen][None] for x in (k, v))
        expected = exact(q[row, head, token][None], keys, values)[0]
        torch.testing.assert_close(out[row, head, token].double(), expected, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("store", STORES)
def test_weights_of_slots_count_sinks_and_sum_over_query_heads(store: torch.dtype) -> None:
    q, sinks = torch.randn(2, 2, 5, 64) / 8, torch.randn(2, 5)
    k, v = (torch.randn(2, 2, 300, 64).to(store) for _ in range(2))
    visible = torch.tensor([[[277]], [[13]]], dtype=torch.int32)
    *_, mass = check_bits(run("attend_with_weights", q, k, v, visible, sinks))
    for row in range(2):
        count = int(visible[row, 0, 0])
        scores = q[row].double() @ k[row, :, :count].double().mT
        weights = torch.cat([scores, sinks.double()[..., None]], dim=-1).softmax(-1)[..., :-1]
        torch.testing.assert_close(mass[row, :, :count].double(), weights.sum(1), atol=1e-6, rtol=1e-5)
        assert not mass[row, :, count:].any()


def test_stores_of_two_dtypes_are_refused() -> None:
    q, store = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 4, 32)
    seen = torch.ones(1, 1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="expected values of Float, got Half"):
        x86.attend_rings(q, store, store.half(), seen)
    with pytest.raises(ValueError, match="expected 16 bits or float32, got Double"):
        x86.attend_rings(q, store.double(), store.double(), seen)
    assert x86.fits_rows(q, store.half())
    assert not x86.fits_rows(q.half(), store.half())

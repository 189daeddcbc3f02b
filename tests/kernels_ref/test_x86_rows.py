"""The kernel of decode rows against float64 attention over the slots that each row sees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_ref.x86 import library as x86

here = pytest.mark.skipif(not x86.is_supported(), reason="needs a CPU with AVX512-BF16")


DIMS = [(32, 32), (64, 64), (96, 32), (256, 256), (576, 512)]
"""Sizes of keys and of values; values of the last ones are views of their keys."""


def plan_of(owner: list[int], last: list[int], visible: list[int]) -> list[torch.Tensor]:
    """Rows of one token and one tail."""
    plan = [torch.tensor(x, dtype=torch.int32) for x in (owner, last, visible)]
    return [plan[0], plan[1][:, None], plan[2][:, None, None]]


def exact(q_KGD: torch.Tensor, k_KTD: torch.Tensor, v_KTD: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("kgd,ktd->kgt", q_KGD.double(), k_KTD.double())
    return torch.einsum("kgt,ktd->kgd", scores.softmax(-1).nan_to_num(), v_KTD.double())


@here
@settings(deadline=None, max_examples=60)
@given(
    owner=st.lists(st.integers(0, 4), max_size=9),
    tails=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (2, 3), (1, 4), (1, 7)]),
    dims=st.sampled_from(DIMS),
    slots=st.sampled_from([4, 16, 100, 200]),
    seed=st.integers(0, 99),
)
def test_each_row_sees_its_units_and_the_head_of_its_tail_although_other_slots_hold_nan(
    owner: list[int], tails: list[int], heads: tuple[int, int], dims: tuple[int, int], slots: int, seed: int
) -> None:
    gen = torch.Generator().manual_seed(seed)
    num_rows, (num_kv, group), (dim, value_dim) = len(tails), heads, dims
    visible = [min(tail, slots) for tail in tails]
    q = (torch.randn(num_rows, num_kv, group, dim, generator=gen) * 2 * dim**-0.5).bfloat16()
    k, v = (
        torch.randn(len(owner) + num_rows, num_kv, slots, size, generator=gen).bfloat16() for size in dims
    )
    if dim == 576:
        v = k[..., :value_dim]
    for store in (k, v):
        for unit, row in enumerate(owner):
            if row >= num_rows:
                store[unit] = torch.nan
        for row in range(num_rows):
            store[len(owner) + row, :, visible[row] :] = torch.nan
    last = [len(owner) + row for row in range(num_rows)]
    partial = x86.attend_blocks(q, k, v, *plan_of(owner, last, visible))
    for row in range(num_rows):
        units = [unit for unit, number in enumerate(owner) if number == row]
        keys, values = (
            torch.cat([*(x[unit] for unit in units), x[last[row], :, : visible[row]]], dim=1) for x in (k, v)
        )
        out = partial.attn[row] / partial.sum[row].clamp(min=1e-30)[..., None]
        torch.testing.assert_close(out.double(), exact(q[row], keys, values), atol=1e-4, rtol=1e-4)
        if not keys.shape[1]:
            assert (partial.sum[row] == 0).all()
            assert (partial.attn[row] == 0).all()


@here
@pytest.mark.parametrize(("num_rows", "heads"), [(3, 2), (1, 1)])
def test_several_threads_give_the_bits_of_one(num_rows: int, heads: int) -> None:
    q = torch.randn(num_rows, heads, 9, 32).bfloat16()
    k, v = (torch.randn(8, heads, 16, 32).bfloat16() for _ in range(2))
    plan = plan_of([0, 1, 2, 0, 0], [5, 6, 7][:num_rows], [3, 0, 16][:num_rows])
    before = torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outputs.append(x86.attend_blocks(q, k, v, *plan))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*outputs))


@here
def test_stores_and_plans_that_do_not_go_with_the_queries_are_refused() -> None:
    q = torch.randn(1, 1, 1, 32).bfloat16()
    store = torch.randn(1, 1, 4, 64).bfloat16()
    none, tail = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    seen = tail[..., None]
    with pytest.raises(ValueError, match=r"expected stores \[X, 1, S, 32\]"):
        x86.attend_blocks(q, store, store, none, tail, seen)
    store = store[..., :32].contiguous()
    with pytest.raises(ValueError, match="expected BFloat16, got Float"):
        x86.attend_blocks(q, store.float(), store.float(), none, tail, seen)
    with pytest.raises(ValueError, match="expected Int, got Long"):
        x86.attend_rings(q, store, store, seen.long())
    with pytest.raises(ValueError, match="expected at most 1 units, got 2"):
        x86.attend_blocks(q, store, store, none.repeat(2), tail, seen)
    with pytest.raises(ValueError, match=r"expected visible to have shape \[1, 1, 1\], got \[2, 1, 1\]"):
        x86.attend_rings(q, store, store, seen.repeat(2, 1, 1))
    with pytest.raises(ValueError, match=r"expected a number of tokens that divides the 1 query heads"):
        x86.attend_rings(q, store, store, seen.repeat(1, 1, 2))
    with pytest.raises(ValueError, match=r"expected position to have shape \[1, 1, 4\], got \[1, 1, 3\]"):
        x86.attend_held(q, store, store, seen.repeat(1, 1, 3), tail, tail, 0)
    whole = x86.attend_rings(q, store, store, seen + 4)
    assert all(map(torch.equal, x86.attend_rings(q, store, store, seen + 10**9), whole)), "no more than all"
    assert x86.fits_rows(q.double(), store.double()) is False
    assert x86.fits_rows(q, store.float()) is False


@here
@settings(deadline=None, max_examples=60)
@given(
    owner=st.lists(st.integers(0, 3), max_size=6),
    num_rows=st.integers(1, 3),
    tokens=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (2, 3), (1, 4)]),
    slots=st.sampled_from([4, 100, 140]),
    seed=st.integers(0, 99),
)
def test_each_token_of_a_row_sees_its_own_part_of_the_tails(
    owner: list[int], num_rows: int, tokens: int, heads: tuple[int, int], slots: int, seed: int
) -> None:
    gen = torch.Generator().manual_seed(seed)
    num_kv, group = heads
    q = (torch.randn(num_rows, num_kv, tokens, group, 64, generator=gen) / 8).bfloat16()
    wide = torch.randn(2, len(owner) + 2 * num_rows, num_kv, slots + 3, 64, generator=gen).bfloat16()
    k, v = wide[0, :, :, :slots], wide[1, :, :, :slots]
    tail_block = torch.arange(len(owner), len(owner) + 2 * num_rows, dtype=torch.int32).view(num_rows, 2)
    visible = torch.randint(0, slots + 1, (num_rows, 2, tokens), generator=gen, dtype=torch.int32)
    for row in range(num_rows):
        for tail in range(2):
            for store in (k, v):
                store[tail_block[row, tail], :, visible[row, tail].max() :] = torch.nan
    owners = torch.tensor(owner, dtype=torch.int32)
    partial = x86.attend_blocks(q.flatten(2, 3), k, v, owners, tail_block, visible)
    out = (partial.attn / partial.sum.clamp(min=1e-30)[..., None]).unflatten(2, (tokens, group))
    for row in range(num_rows):
        for token in range(tokens):
            seen = [(unit, slots) for unit, number in enumerate(owner) if number == row]
            seen += [(int(tail_block[row, tail]), int(visible[row, tail, token])) for tail in range(2)]
            keys, values = (torch.cat([x[unit, :, :end] for unit, end in seen], dim=1) for x in (k, v))
            expected = exact(q[row, :, token], keys, values)
            torch.testing.assert_close(out[row, :, token].double(), expected, atol=1e-4, rtol=1e-4)


@here
@settings(deadline=None, max_examples=60)
@given(
    num_rows=st.integers(1, 3),
    tokens=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (2, 3), (1, 4)]),
    is_per_head=st.booleans(),
    slots=st.sampled_from([4, 100, 140]),
    sink=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_each_token_sees_the_positions_of_its_interval_wherever_they_lie(
    num_rows: int, tokens: int, heads: tuple[int, int], is_per_head: bool, slots: int, sink: int, seed: int
) -> None:
    gen = torch.Generator().manual_seed(seed)
    num_kv, group = heads
    q = (torch.randn(num_rows, num_kv, tokens, group, 64, generator=gen) / 8).bfloat16()
    k, v = (torch.randn(num_rows + 1, num_kv, slots, 64, generator=gen).bfloat16() for _ in range(2))
    shape = (num_rows, num_kv if is_per_head else 1, slots)
    position = torch.randint(-1, 200, shape, generator=gen, dtype=torch.int32)
    begin, end = torch.randint(0, 220, (2, num_rows, tokens), generator=gen, dtype=torch.int32)
    partial = x86.attend_held(q.flatten(2, 3), k, v, position, begin, end, sink)
    out = (partial.attn / partial.sum.clamp(min=1e-30)[..., None]).unflatten(2, (tokens, group))
    for row in range(num_rows):
        for token in range(tokens):
            for head in range(num_kv):
                held = position[row, head if is_per_head else 0]
                first, last = int(begin[row, token]), int(end[row, token])
                seen = (held >= 0) & (held < last) & ((held >= first) | (held < sink))
                keys, values = (x[row, head, seen][None] for x in (k, v))
                expected = exact(q[row, head, token][None], keys, values)[0]
                torch.testing.assert_close(out[row, head, token].double(), expected, atol=1e-4, rtol=1e-4)
                assert bool(seen.any()) == bool((partial.sum[row, head, token * group] > 0).all())


@here
@settings(deadline=None, max_examples=20)
@given(visible=st.lists(st.integers(0, 40), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_ring_is_the_last_unit_of_its_row(visible: list[int], seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    num_rows = len(visible)
    q = torch.randn(num_rows, 2, 3, 64, generator=gen).bfloat16()
    k, v = (torch.randn(num_rows + 1, 2, 40, 64, generator=gen).bfloat16() for _ in range(2))
    none, own, seen = plan_of([], list(range(num_rows)), visible)
    expected = x86.attend_blocks(q, k, v, none, own, seen)
    assert all(map(torch.equal, x86.attend_rings(q, k, v, seen), expected))


@here
def test_compiled_code_calls_the_operators_and_they_promise_what_they_return() -> None:
    q = torch.randn(2, 1, 2, 32).bfloat16()
    store = torch.randn(4, 1, 8, 32).bfloat16()
    plan = plan_of([0, 1], [2, 3], [3, 8])
    held = (torch.arange(8, dtype=torch.int32).expand(2, 1, 8), plan[1], plan[2][..., 0], 1)
    x86.attend_blocks(q, store, store, *plan)
    operators = torch.ops.hpu_duo_x86_v3
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.attend_blocks.default, (q, store, store, *plan), test_utils=checks)
    torch.library.opcheck(operators.attend_rings.default, (q, store, store, plan[2]), test_utils=checks)
    torch.library.opcheck(operators.attend_held.default, (q, store, store, *held), test_utils=checks)
    compiled = torch.compile(
        lambda x: x86.attend_rings(x * 2, store, store, plan[2]).attn + 1, fullgraph=True
    )
    torch.testing.assert_close(compiled(q), x86.attend_rings(q * 2, store, store, plan[2]).attn + 1)

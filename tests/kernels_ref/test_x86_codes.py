"""Decode rows over codes against float64, each number of lanes against the model, and codes widened."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_ref.formats import KVFormat, format_of
from kernels_ref.units import Encoding, KVUnits, UnitLayout, units_of
from kernels_ref.x86 import codes
from kernels_ref.x86 import library as x86
from tests.kernels_ref.test_x86_float_rows import check_bits, run
from tests.kernels_ref.test_x86_rows import exact, plan_of
from tests.needs import needs_x86_kernels

pytestmark = [
    needs_x86_kernels,
    pytest.mark.instruction_set,
]

NAMES = (
    "int8_per_token_head",
    "int4_per_token_head",
    "k8v4",
    "fp8",
    "fp8_per_token_head",
    "int4_per_token_head:fp8",
)


def stored(kv_format: KVFormat, kv: torch.Tensor, dtype: torch.dtype) -> KVUnits:
    """Units of keys and values ``[2, X, K, S, D]``, behind a few vectors of another store."""
    _, num_units, num_heads, num_slots, dim = kv.shape
    layout = UnitLayout(num_units, num_heads, num_slots, num_slots, num_heads * num_slots + 3, 3)
    tensors = []
    for vectors, x in zip((kv_format.keys, kv_format.values), kv):
        for part in vectors.encode(x):
            flat = torch.full((num_units, layout.unit_stride, part.shape[-1]), 255).to(part.dtype)
            flat[:, 3:] = part.reshape(num_units, -1, part.shape[-1])
            tensors.append(flat.flatten(0, 1))
    return units_of(tuple(tensors), layout, Encoding(kv_format, dim, dim, dtype))


def poison(units: KVUnits, unit: int, first: int) -> None:
    """Fill the slots of a unit, from the first on, with codes of ones and scales of NaN."""
    for view in units.views:
        view[unit, :, first:] = (
            torch.nan if view.dtype == torch.bfloat16 else -1 if view.dtype == torch.int8 else 255
        )


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    owner=st.lists(st.integers(0, 4), max_size=6),
    tails=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 2), (2, 3), (1, 4), (1, 7)]),
    dim=st.sampled_from([32, 64, 96, 256]),
    slots=st.sampled_from([4, 16, 140]),
    seed=st.integers(0, 99),
)
def test_each_row_sees_what_its_stores_give_back_although_other_slots_hold_nan(
    name: str,
    dtype: torch.dtype,
    owner: list[int],
    tails: list[int],
    heads: tuple[int, int],
    dim: int,
    slots: int,
    seed: int,
) -> None:
    gen = torch.Generator().manual_seed(seed)
    num_rows, (num_kv, group) = len(tails), heads
    visible = [min(tail, slots) for tail in tails]
    q = (torch.randn(num_rows, num_kv, group, dim, generator=gen) * 2 * dim**-0.5).to(dtype)
    shape = len(owner) + num_rows, num_kv, slots, dim
    # Vectors of very different sizes, so that each needs its own scale.
    sizes = torch.rand(2, *shape[:3], 1, generator=gen) * 2
    units = stored(format_of(name), torch.randn(2, *shape, generator=gen) * sizes, torch.float32)
    last = [len(owner) + row for row in range(num_rows)]
    for row in range(num_rows):
        poison(units, last[row], visible[row])
    plan = plan_of(owner, last, visible)
    # Queries of 16 bits are multiplied as words, with weights as multiples of 2^-15 of the largest.
    bound = 1e-5 if dtype == torch.float32 else 1e-3
    attn, _, total = check_bits(run("attend_coded_blocks", q, *codes._pairs(units), *plan))
    k, v = units.encoding.decoded(units.views)
    for row in range(num_rows):
        seen = [unit for unit, number in enumerate(owner) if number == row]
        keys, values = (
            torch.cat([*(x[unit] for unit in seen), x[last[row], :, : visible[row]]], dim=1) for x in (k, v)
        )
        out = attn[row] / total[row].clamp(min=1e-30)[..., None]
        torch.testing.assert_close(out.double(), exact(q[row], keys, values), atol=bound, rtol=bound)


def test_each_token_of_a_row_sees_the_slots_of_a_tail_before_its_limit() -> None:
    q = torch.randn(1, 2, 3 * 2, 64) / 8
    units = stored(format_of("int4_per_token_head"), torch.randn(2, 3, 2, 16, 64), torch.float32)
    limits = torch.tensor([[[5, 9, 12]]], dtype=torch.int32)
    plan = torch.tensor([0, 7], dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32), limits
    attn, _, total = check_bits(run("attend_coded_blocks", q, *codes._pairs(units), *plan))
    k, v = units.tile(slice(0, 3))
    for token, limit in enumerate((5, 9, 12)):
        keys, values = (torch.cat([x[0], x[2, :, :limit]], dim=1) for x in (k, v))
        some = slice(2 * token, 2 * token + 2)
        out = (attn / total[..., None])[0, :, some]
        torch.testing.assert_close(out.double(), exact(q[0, :, some], keys, values), atol=5e-6, rtol=5e-6)


def test_small_weights_that_round_to_0_do_not_pull_values_to_their_zeros() -> None:
    k, v = torch.zeros(1, 1, 128, 64), torch.randn(1, 1, 128, 64, generator=torch.Generator().manual_seed(0))
    k[:, :, 0] = 1
    units = stored(format_of("int8_per_token_head:int4_per_token_head"), torch.stack([k, v]), torch.float32)
    # One key has a weight of almost 1, each of the others less than half of 2^-15.
    q = torch.full((1, 1, 1, 64), 11.2 / 64).bfloat16()
    attn, _, total = check_bits(run("attend_coded_blocks", q, *codes._pairs(units), *plan_of([], [0], [128])))
    expected = exact(q[0], *(x[0] for x in units.encoding.decoded(units.views)))
    torch.testing.assert_close((attn / total[..., None])[0].double(), expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_per_token_head"])
def test_numbers_of_any_size_and_nan_come_through_words(name: str) -> None:
    k, v = torch.randn(2, 1, 1, 5, 64)
    k[0, 0, 1], v[0, 0, 2], v[0, 0, 3] = 0, v[0, 0, 2] * 1e25, v[0, 0, 3] * 1e-25
    units = stored(format_of(name), torch.stack([k, v]), torch.float32)
    q, plan = torch.randn(1, 1, 4, 64).bfloat16() / 8, plan_of([], [0], [5])
    q[0, 0, 1] *= 1e-36
    attn, _, total = check_bits(run("attend_coded_blocks", q, *codes._pairs(units), *plan))
    expected = exact(q[0], *(x[0] for x in units.encoding.decoded(units.views)))
    torch.testing.assert_close((attn / total[..., None])[0].double(), expected, atol=1e20, rtol=1e-3)
    units.views[3][0, 0, 4] = torch.nan
    found = run("attend_coded_blocks", q, *codes._pairs(units), *plan)
    assert all(attn.isnan().all() for attn, *_ in found)


def test_rings_are_read_to_their_limits() -> None:
    units = stored(format_of("k8v4"), torch.randn(2, 3, 2, 16, 64), torch.float32)
    q, visible = torch.randn(2, 2, 4, 64) / 8, torch.tensor([[[16]], [[5]]], dtype=torch.int32)
    poison(units, 1, 5)
    found = codes.attend_rings(q, units, visible)
    k, v = units.encoding.decoded(units.views)
    for row, limit in enumerate((16, 5)):
        out = found.attn[row] / found.sum[row][..., None]
        expected = exact(q[row], k[row, :, :limit], v[row, :, :limit])
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_compiled_code_calls_the_operators() -> None:
    units = stored(format_of("int4_per_token_head"), torch.randn(2, 3, 2, 16, 64), torch.float32)
    q, plan, pairs = torch.randn(1, 2, 4, 64), plan_of([0, 0], [2], [9]), codes._pairs(units)
    index = torch.tensor([1], dtype=torch.int32)
    operators, checks = torch.ops.hpu_duo_x86_v3, ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.attend_coded_blocks.default, (q, *pairs, *plan), test_utils=checks)
    more = (*pairs[:2], index, 64, torch.float32)
    torch.library.opcheck(operators.widen_codes.default, more, test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_tiles_have_the_bits_of_decoded_codes(name: str, dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).expand(3, 2, 18, 256)
    units = stored(format_of(name), torch.randn(2, 3, 2, 18, 256) * 2, dtype)
    for view in units.views:
        if view.dtype != torch.bfloat16:
            view.copy_(every.view(view.dtype)[..., : view.shape[-1]])
    index = torch.tensor([2, 0], dtype=torch.int32)
    for found, expected in zip(codes.tile(units, index), units.tile(index)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    for instructions in x86.variants(torch.float32):
        operator = torch.ops.hpu_duo_x86_v3.widen_codes.default
        found = operator(*codes._pairs(units)[:2], index, 256, dtype, x86.NUMBER_OF[instructions])
        torch.testing.assert_close(found, units.tile(index)[0], rtol=0, atol=0, equal_nan=True)


def test_stores_that_do_not_go_together_are_refused() -> None:
    units = stored(format_of("k8v4"), torch.randn(2, 1, 1, 4, 32), torch.float32)
    pairs, seen = codes._pairs(units), plan_of([], [0], [4])
    operator = torch.ops.hpu_duo_x86_v3.attend_coded_blocks.default
    with pytest.raises(ValueError, match="bytes of vectors of 64 elements"):
        operator(torch.randn(1, 1, 1, 64), *pairs, *seen)
    with pytest.raises(ValueError, match="expected a scale of each vector of int8"):
        operator(torch.randn(1, 1, 1, 32), pairs[0], None, *pairs[2:], *seen)
    with pytest.raises(IndexError, match="expected units below 1, got 1"):
        codes.tile(units, torch.ones(1, dtype=torch.int32))
    assert not codes.serves(format_of("int8_per_token_head:bfloat16"))

"""The two ends of a layer in Triton: keys and values are written, and partial results are finished."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels_ref import (
    Implementation,
    NewKV,
    Partial,
    of_stores,
)
from kernels_ref import partial as algebra
from kernels_ref.impl import kernels
from tests.kernels_ref.test_triton_parity import DEVICE, DTYPES, on_device
from tests.triton_interpreter import replacing_once


@pytest.fixture(autouse=True, scope="module")
def _fast_interpreter() -> Iterator[None]:
    with replacing_once():
        yield


@pytest.mark.parametrize("dtype", DTYPES)
def test_writing_changes_exactly_the_wanted_slots_and_takes_strided_vectors(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(9, 2, 2 * 24, generator=generator).to(dtype)
    k, v = wide[..., :24].to(DEVICE), wide.to(DEVICE)[..., 24:]
    index = torch.randperm(5 * 2 * 4, generator=generator)[:18].to(DEVICE)
    stores = [torch.full((5, 2, 4, 24), torch.nan, dtype=dtype, device=DEVICE) for _ in range(4)]
    ours, theirs = (stores[0], stores[1]), (stores[2], stores[3])
    record = of_stores(*ours).encode(NewKV(k, v))
    kernels(Implementation.TRITON).write_kv(of_stores(*ours), index, record)
    of_stores(*theirs).write(index, record)
    for got, wanted in zip(ours, theirs):
        torch.testing.assert_close(got, wanted, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_token_parts", [0, 1, 2])
@pytest.mark.parametrize("has_rows", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_end_of_a_layer_equals_the_algebra_of_partials(
    dtype: torch.dtype, num_token_parts: int, has_rows: bool, has_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(num_token_parts)

    def random_partial(num: int) -> Partial:
        attn = torch.randn(num, 2, 3, 20, generator=generator)
        largest = torch.randn(num, 2, 3, generator=generator) * 5
        partial = Partial(attn, largest, 1 + torch.rand(num, 2, 3, generator=generator))
        nothing = algebra.empty(attn)
        is_empty = torch.rand(num, generator=generator) < 0.3
        for full, none in zip(partial, nothing):
            full[is_empty] = none[is_empty]
        return on_device(partial, DEVICE)

    q = torch.zeros(7, 2, 3, 20, dtype=dtype, device=DEVICE)
    tokens = [random_partial(7) for _ in range(num_token_parts)]
    rows = random_partial(3) if has_rows else None
    decode_slot = torch.tensor([3, 0, 3, 2, 1, 3, 3], dtype=torch.int32, device=DEVICE)
    sinks = torch.randn(2, 3, generator=generator).to(DEVICE) if has_sinks else None
    got = kernels(Implementation.TRITON).finish(q, tokens, rows, decode_slot, sinks)
    wanted = algebra.finish(q, tokens, rows, decode_slot, sinks)
    assert got.dtype == dtype
    rounding = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(got, wanted, atol=rounding, rtol=rounding)

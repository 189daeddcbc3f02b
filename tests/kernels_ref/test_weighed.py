"""Decode attention that tells what each slot receives: equal to plain softmax, in every implementation."""

from __future__ import annotations

import math

import pytest
import torch

from bias_builders import Leading
from kernels_ref import Implementation, of_stores
from kernels_ref.groups import RingStep
from kernels_ref.impl import kernels
from kernels_ref.partial import normalise
from kernels_ref.x86 import library as x86
from tests.kernels_ref.parts import inputs_of

pytestmark = pytest.mark.instruction_set

K, D, NUM_SLOTS = 3, 64, 300


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: list[int], sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs without sinks and column sums with them, head by head."""
    outputs, mass = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(len(q), K, NUM_SLOTS)
    for row, seen in enumerate(visible):
        for head in range(K):
            for member in range(q.shape[2]) if seen else ():
                scores = k[row, head, :seen].double() @ q[row, head, member].double()
                weights = torch.softmax(scores, dim=0)
                outputs[row, head, member] = weights @ v[row, head, :seen].double()
                total = torch.logsumexp(scores, dim=0)
                if sinks is not None:
                    total = torch.logaddexp(total, sinks[head, member].double())
                mass[row, head, :seen] += torch.exp(scores - total).float()
    return outputs, mass


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("visible", [[300, 300], [300, 1, 0, 129], [0]], ids=str)
@pytest.mark.parametrize("group", [1, 2, 4, 6])
@pytest.mark.parametrize(
    ("impl", "dtype"),
    [
        (Implementation.REFERENCE, torch.float32),
        (Implementation.SDPA, torch.float32),
        (Implementation.SDPA, torch.bfloat16),
    ],
)
def test_slots_receive_what_softmax_gives_them(
    impl: Implementation, dtype: torch.dtype, group: int, visible: list[int], has_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(group)
    num_rows = len(visible)
    q = torch.randn(num_rows, K, group, D, generator=generator).mul(0.3).to(dtype)
    k, v = (torch.randn(num_rows + 1, K, NUM_SLOTS, D, generator=generator).to(dtype) for _ in range(2))
    sinks = torch.randn(K, group, generator=generator) if has_sinks else None
    expected, mass = plain(q, k, v, visible, sinks)
    for row, seen in enumerate(visible):
        k[row, :, seen:] = v[row, :, seen:] = math.nan
    nothing = torch.zeros(0, dtype=torch.int32)
    seen = Leading(torch.tensor(visible, dtype=torch.int32)[:, None, None])
    ring = RingStep(nothing, seen, nothing)
    partial, found = kernels(impl).unique_with_weights(inputs_of(q, units=of_stores(k, v), sinks=sinks), ring)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(normalise(partial, torch.float64), expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(found, mass, atol=1e-4, rtol=1e-4)
    share = 1.0 if sinks is None else None
    if share is not None:
        wanted = torch.tensor([float(group) if seen else 0.0 for seen in visible])
        torch.testing.assert_close(found.sum(dim=-1), wanted[:, None].expand(-1, K), atol=1e-3, rtol=0)


@pytest.mark.skipif(not x86.is_available(), reason="needs AVX512-BF16 and a compiler")
def test_the_kernel_and_the_portable_part_agree_on_equal_numbers() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, K, n, D, generator=generator).bfloat16() for n in (2, NUM_SLOTS, NUM_SLOTS))
    seen = torch.tensor([NUM_SLOTS, 77], dtype=torch.int32)[:, None, None]
    nothing = torch.zeros(0, dtype=torch.int32)
    ring = RingStep(nothing, Leading(seen), nothing)
    ours, mass = x86.attend_with_weights(q, k, v, seen, None)
    portable, wanted = kernels(Implementation.REFERENCE).unique_with_weights(
        inputs_of(q, units=of_stores(k, v)), ring
    )
    torch.testing.assert_close(ours.max, portable.max, atol=0.1, rtol=0)
    torch.testing.assert_close(mass, wanted, atol=2e-2, rtol=0)

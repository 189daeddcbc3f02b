"""Sums of attention weights by key on CPU kernels, against float64 head by head."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_ref import Implementation
from kernels_ref.impl import kernels
from kernels_ref.x86 import library as x86
from kernels_ref.x86.library import Instructions, is_supported, variants
from tests.kernels_ref.budget_cases import some_chunks

here = pytest.mark.skipif(not is_supported(), reason="needs a CPU with AVX512-BF16")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="cases lie on the GPU where there is one")
each = pytest.mark.parametrize("instructions", variants())


def exact(q: torch.Tensor, k: torch.Tensor, offset: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exps of the queries, and sums of their weights."""
    scores = torch.einsum("skgd,tkd->skgt", q.double(), k.double())
    if offset is not None:
        sees = torch.arange(len(k)) <= torch.arange(len(q))[:, None] + offset
        scores = torch.where(sees[:, None, None], scores, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    return lse.float(), torch.exp(scores - lse[..., None]).sum(dim=(0, 2))


@here
@each
@settings(deadline=None, max_examples=40)
@given(
    num_queries=st.integers(1, 90),
    num_keys=st.integers(1, 200),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    dim=st.sampled_from([16, 64, 80, 128]),
    offset=st.one_of(st.none(), st.integers(0, 100)),
    seed=st.integers(0, 99),
)
def test_keys_receive_what_softmax_gives_them(
    instructions: Instructions,
    num_queries: int,
    num_keys: int,
    heads: tuple[int, int],
    dim: int,
    offset: int | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_queries, heads[0], heads[1], dim, generator=generator).mul(2 * dim**-0.5).bfloat16()
    # Keys are a part of more heads, and lie head by head or token by token.
    k = torch.randn(num_keys, heads[0] + 1, dim, generator=generator).bfloat16()[:, 1:]
    k = k.transpose(0, 1).contiguous().transpose(0, 1) if seed % 2 else k
    lse, expected = exact(q, k, offset)
    found = x86.column_sums(q, k, lse, offset=offset, instructions=instructions)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


@here
@each
def test_several_threads_give_the_bits_of_one(instructions: Instructions) -> None:
    q, k = torch.randn(50, 2, 3, 64).bfloat16(), torch.randn(300, 2, 64).bfloat16()
    lse, _ = exact(q, k, 200)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(x86.column_sums(q, k, lse, offset=200, instructions=instructions))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@here
@on_cpu
@settings(deadline=None, max_examples=30)
@given(
    texts=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 70)), min_size=1, max_size=3),
    num_slots=st.sampled_from([0, 7, 40]),
    num_observed=st.sampled_from([None, 1, 32]),
    seed=st.integers(0, 99),
)
def test_rows_with_slots_that_hold_anything_give_the_sums_of_their_queries(
    texts: list[tuple[int, int]], num_slots: int, num_observed: int | None, seed: int
) -> None:
    chunks, expected = some_chunks(texts, num_slots, (2, 3, 64), torch.bfloat16, seed=seed)
    found = chunks.sums(kernels(Implementation.SDPA), num_observed)
    # Scores go up to some thirty here, and float32 sums of products are off by more.
    torch.testing.assert_close(found.double().cpu(), expected(num_observed), atol=2e-3, rtol=2e-3)


@here
def test_what_does_not_go_together_is_refused() -> None:
    q, k, lse = torch.randn(4, 2, 3, 32).bfloat16(), torch.randn(5, 2, 32).bfloat16(), torch.zeros(4, 2, 3)
    with pytest.raises(ValueError, match=r"expected queries \[S, K, G, D\] and keys \[T, K, D\]"):
        x86.column_sums(q, k[:, :1], lse)
    with pytest.raises(ValueError, match="a multiple of 16"):
        x86.column_sums(q[..., :8], k[..., :8], lse)
    with pytest.raises(ValueError, match="expected lse to have shape"):
        x86.column_sums(q, k, lse[:3])
    with pytest.raises(ValueError, match="got Double"):
        x86.column_sums(q.double(), k.double(), lse)

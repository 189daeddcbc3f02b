"""The slot that is given up, in every implementation, against a search through all of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_ref import Implementation
from kernels_ref.impl import kernels
from kernels_ref.x86 import library as x86
from tests.needs import needs_x86_kernels

pytestmark = pytest.mark.instruction_set

K = 3


@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("impl", [Implementation.REFERENCE, Implementation.SDPA, Implementation.HPU])
@given(
    num_rows=st.integers(1, 3),
    num_slots=st.integers(1, 70),
    num_scores=st.sampled_from([0, 1, 3, 1 << 20]),
    protects=st.sampled_from(["nothing", "some", "some, of all heads", "all but one"]),
    seed=st.integers(0, 1 << 20),
)
def test_the_lowest_score_goes_and_the_lowest_position_of_equal_ones(
    impl: Implementation, num_rows: int, num_slots: int, num_scores: int, protects: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, K, num_slots)
    order = torch.rand(shape, generator=generator).argsort(dim=-1)
    position = (order + torch.randint(0, 1 << 20, (num_rows, 1, 1), generator=generator)).to(torch.int32)
    score = None
    if num_scores:
        score = torch.randint(-num_scores, num_scores + 1, shape, generator=generator) * 0.37
    is_protected = None
    if protects != "nothing":
        heads = 1 if protects == "some, of all heads" else K
        chance = 1.0 if protects == "all but one" else 0.5
        is_protected = torch.rand(num_rows, heads, num_slots, generator=generator) < chance
        is_protected[..., int(torch.randint(num_slots, (), generator=generator))] = False
    found = kernels(impl).eviction_victims(score, position, is_protected)
    assert found.dtype == torch.int32
    assert found.shape == shape[:2]
    if impl is Implementation.SDPA and x86.is_available(torch.float32):
        operator = torch.ops.hpu_duo_x86_v3.eviction_victims.default
        for name in x86.variants(torch.float32):
            assert torch.equal(operator(score, position, is_protected, x86.NUMBER_OF[name]), found), name
    value = torch.zeros(shape) if score is None else score
    for row in range(num_rows):
        for head in range(K):
            candidates = [
                (float(value[row, head, slot]), int(position[row, head, slot]), slot)
                for slot in range(num_slots)
                if is_protected is None or not is_protected[row, head % is_protected.shape[1], slot]
            ]
            assert int(found[row, head]) == min(candidates)[2]


@needs_x86_kernels
def test_arguments_that_do_not_fit_are_refused() -> None:
    position = torch.zeros(2, K, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="expected score to have shape"):
        x86.eviction_victims(torch.zeros(2, K, 4), position, None)
    with pytest.raises(ValueError, match="expected Int, got Long"):
        x86.eviction_victims(None, position.long(), None)
    with pytest.raises(ValueError, match=r"expected position \[N, K, C\]"):
        x86.eviction_victims(None, position[0], None)

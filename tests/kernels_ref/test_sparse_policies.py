"""Rules by position keep what the patterns of the Sparse Transformer let the newest token see."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.heads.eviction import Fixed, Strided
from kernels_ref import KVPolicy, SlotView

POLICIES = st.one_of(
    st.integers(1, 12).flatmap(lambda stride: st.builds(Fixed, st.just(stride), st.integers(1, stride))),
    st.builds(Strided, st.integers(1, 12)),
)


def sees(policy: KVPolicy, query: int, key: int) -> bool:
    """The definition of the patterns, for queries at a multiple of the stride where columns stand still."""
    match policy:
        case Fixed(stride, columns):
            return query // stride == key // stride or key % stride >= stride - columns
        case Strided(stride):
            anchor = query // stride * stride
            return query - key < stride or (anchor - key) % stride == 0
    raise AssertionError(policy)


def protected(policy: KVPolicy, end: int) -> set[int]:
    position = torch.arange(end, dtype=torch.int32)[None, None]
    valid = torch.ones_like(position, dtype=torch.bool)
    marks = policy.protects(
        SlotView(torch.zeros(1, 1, end), position, valid, torch.tensor([[[end]]], dtype=torch.int32), end)
    )
    assert marks is not None
    return set(marks.expand(1, 1, end).flatten().nonzero().flatten().tolist())


@given(POLICIES, st.integers(1, 70))
def test_protected_tokens_are_those_that_the_newest_one_sees(policy: KVPolicy, end: int) -> None:
    assert protected(policy, end) == {key for key in range(end) if sees(policy, end - 1, key)}


@given(POLICIES, st.integers(1, 70))
def test_a_token_that_is_not_seen_now_is_never_seen_again(policy: KVPolicy, end: int) -> None:
    assert protected(policy, end + 1) <= protected(policy, end) | {end}


@given(POLICIES, st.integers(1, 70))
def test_slots_needed_are_the_most_that_are_seen_at_any_place(policy: KVPolicy, max_len: int) -> None:
    assert policy.num_needed(max_len) == max(len(protected(policy, end)) for end in range(1, max_len + 1))

"""Choice of slots, and sums of weights by key, against lists and dense matrices."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.heads.eviction import TOVA, HeavyHitters, Local, StreamingLLM
from kernels_ref import KVPolicy, NewKV, Partial, SlotView, reference
from kernels_ref.groups.budget_slots import assign_slots, kept_tokens, slot_to_write
from kernels_ref.groups.column_sums import ChunkStep, column_sums, log_sum_exp, summed_queries
from tests.kernels_ref.budget_cases import some_chunks
from tests.kernels_ref.parts import inputs_of

pytestmark = pytest.mark.instruction_set

POLICIES: list[KVPolicy] = [Local(), StreamingLLM(2), HeavyHitters(0.5), HeavyHitters(0.0), TOVA(2)]
SIZES = st.tuples(st.integers(3, 9), st.integers(1, 12), st.integers(0, 1 << 30))


def some_slots(
    num_slots: int, num_new: int, seed: int, is_full: bool
) -> tuple[SlotView, list[dict[int, float]], int]:
    """Slots and new tokens of a row and two heads, with scores of few values; the same as dictionaries."""
    generator = torch.Generator().manual_seed(seed)
    num_stored = num_slots if is_full else int(torch.randint(0, num_slots + 1, (1,), generator=generator))
    start = num_stored if num_stored < num_slots else num_slots + seed % 7
    size = num_slots + num_new
    position = torch.full((1, 2, size), -7, dtype=torch.int32)
    for head in range(2):
        held = torch.randperm(start, generator=generator)[:num_stored]
        position[0, head, :num_stored] = held.to(torch.int32)
        position[0, head, num_slots:] = torch.arange(start, start + num_new)
    score = torch.randint(0, 4, (1, 2, size), generator=generator).float()
    valid = torch.ones(1, 1, size, dtype=torch.bool)
    valid[..., num_stored:num_slots] = False
    end = torch.tensor([[[start + num_new]]], dtype=torch.int32)
    tokens = [
        {int(p): float(s) for p, s, v in zip(position[0, h], score[0, h], valid[0, 0]) if v} for h in range(2)
    ]
    return SlotView(score, position, valid, end, num_slots), tokens, num_stored


def eviction_victims(policy: KVPolicy, scores: dict[int, float], end: int, num_slots: int) -> int:
    """The position that goes, found one by one."""

    def is_free(position: int) -> bool:
        match policy:
            case StreamingLLM():
                return position >= policy.sink
            case HeavyHitters():
                return position < end - math.floor(policy.recent * num_slots)
            case TOVA():
                return position < end - policy.protect
        return True

    return min((score, position) for position, score in scores.items() if is_free(position))[1]


@settings(max_examples=60)
@given(SIZES, st.sampled_from(POLICIES))
def test_a_chunk_leaves_what_is_left_after_one_token_after_the_other_has_gone(
    sizes: tuple[int, int, int], policy: KVPolicy
) -> None:
    num_slots, num_new, seed = sizes
    slots, tokens, _ = some_slots(num_slots, num_new, seed, is_full=seed % 2 == 0)
    keeps = kept_tokens(policy, slots)
    end = int(slots.end)
    for head, scores in enumerate(tokens):
        while len(scores) > num_slots:
            del scores[eviction_victims(policy, scores, end, num_slots)]
        assert set(slots.position[0, head][keeps[0, head]].tolist()) == set(scores)


@settings(max_examples=60)
@given(SIZES, st.sampled_from(POLICIES))
def test_a_decode_writes_the_first_free_slot_or_that_of_the_token_that_goes(
    sizes: tuple[int, int, int], policy: KVPolicy
) -> None:
    num_slots, _, seed = sizes
    slots, tokens, num_stored = some_slots(num_slots, 0, seed, is_full=seed % 3 > 0)
    slots = slots._replace(end=slots.end + 1)
    if policy.num_observed == 0:  # its scores never leave 0
        slots = slots._replace(score=torch.zeros_like(slots.score))
        tokens = [dict.fromkeys(scores, 0.0) for scores in tokens]
    written = slot_to_write(policy, slots, torch.tensor([num_stored], dtype=torch.int32))
    for head, scores in enumerate(tokens):
        slot = int(written[0, head])
        if num_stored < num_slots:
            assert slot == num_stored
        else:
            gone = eviction_victims(policy, scores, int(slots.end), num_slots)
            assert int(slots.position[0, head, slot]) == gone


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 1 << 30))
def test_tokens_that_stay_get_distinct_slots_of_tokens_that_go(
    num_slots: int, num_new: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    keeps_old = torch.rand(2, 3, num_slots, generator=generator) < 0.5
    keeps_new = torch.rand(2, 3, num_new, generator=generator) < 0.5
    room = num_slots - keeps_old.sum(dim=-1, keepdim=True)
    keeps_new &= keeps_new.cumsum(dim=-1) <= room
    slot, source = assign_slots(keeps_old, keeps_new)
    for row in range(2):
        for head in range(3):
            taken = slot[row, head][keeps_new[row, head]].tolist()
            assert taken == (~keeps_old[row, head]).nonzero().flatten().tolist()[: len(taken)]
            assert (slot[row, head][~keeps_new[row, head]] == num_slots).all()
            expected = [num_new] * num_slots
            for number, place in zip(keeps_new[row, head].nonzero().flatten().tolist(), taken):
                expected[place] = number
            assert source[row, head].tolist() == expected


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(2, 150)), min_size=1, max_size=3),
    st.sampled_from([None, 1, 5, 200]),
    st.sampled_from([1, 3]),
    st.booleans(),
)
def test_columns_sum_to_the_queries_and_are_those_of_the_matrix_of_weights(
    texts: list[tuple[int, int]], num_observed: int | None, group: int, has_sinks: bool
) -> None:
    generator, num_slots, num_heads, dim = torch.Generator().manual_seed(len(texts)), 9, 2, 8
    longest, num_queries = max(n for _, n in texts), sum(n for _, n in texts)
    q = torch.randn(num_queries, num_heads, group, dim, generator=generator)
    new = torch.randn(num_queries, num_heads, dim, generator=generator)
    old = torch.randn(len(texts), num_heads, num_slots, dim, generator=generator)
    sinks = torch.randn(num_heads, group, generator=generator) if has_sinks else None
    # One row more, which does not exist.
    begins = [sum(n for _, n in texts[:row]) for row in range(len(texts))]
    numbers = [(min(s, num_slots), n, b) for (s, n), b in zip(texts, begins)] + [(0, 0, 0)]
    stored, lengths, first = (torch.tensor(x, dtype=torch.int32) for x in zip(*numbers))
    token = torch.clamp(first[:, None] + torch.arange(longest, dtype=torch.int32), max=num_queries - 1)
    chunk = ChunkStep(torch.arange(len(numbers), dtype=torch.int32), stored, lengths, token)
    slots = torch.cat([old, old[:1]])
    slots[(torch.arange(num_slots) >= stored[:, None])[:, None].expand(-1, num_heads, -1)] = math.nan

    expected = torch.zeros(len(numbers), num_heads, num_slots + longest)
    lse = torch.zeros(num_queries, num_heads, group)
    for row, (seen, length, begin) in enumerate(numbers):
        for query in range(length):
            for head in range(num_heads):
                for member in range(group):
                    mine = torch.cat([old[row, head, :seen], new[begin : begin + query + 1, head]])
                    scores = mine @ q[begin + query, head, member]
                    total = torch.logsumexp(scores, dim=0)
                    if sinks is not None:
                        total = torch.logaddexp(total, sinks[head, member])
                    lse[begin + query, head, member] = total
                    if num_observed is None or query >= length - num_observed:
                        weights = torch.exp(scores - total)
                        expected[row, head, :seen] += weights[:seen]
                        expected[row, head, num_slots : num_slots + query + 1] += weights[seen:]
    found = column_sums(inputs_of(q, new=NewKV(new, new)), lse, slots, chunk, num_observed)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    if not has_sinks:
        counted = [min(n, num_observed or n) * group for _, n, _ in numbers]
        torch.testing.assert_close(
            found.sum(dim=-1), torch.tensor(counted).float()[:, None].expand(-1, num_heads), atol=1e-2, rtol=0
        )


def test_weights_on_many_keys_are_summed_in_smaller_slices_of_queries() -> None:
    assert summed_queries(17_000 + 130) < 128 < 130
    chunks, exact = some_chunks([(17_000, 130), (3, 5)], 17_000, (1, 1, 4), torch.float32)
    for num_observed in (None, 120):
        found = chunks.sums(reference, num_observed)
        torch.testing.assert_close(found, exact(num_observed).float(), atol=1e-5, rtol=1e-4)


def test_the_log_sum_exp_of_parts_is_that_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 2, 3, 12, generator=generator).mul(9)
    parts = []
    for some in scores.split([4, 8], dim=-1):
        largest = some.amax(dim=-1)
        attn = torch.zeros(*largest.shape, 4)
        parts.append(Partial(attn, largest, torch.exp(some - largest[..., None]).sum(dim=-1)))
    torch.testing.assert_close(log_sum_exp(parts, None), torch.logsumexp(scores, dim=-1))

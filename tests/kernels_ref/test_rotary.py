"""Turned vectors, expected queries, and keys at their ranks, against definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_ref.groups.budget_chunks import Turn, composed, future_queries, turned, turned_by_rank, turns
from kernels_ref.groups.column_sums import ChunkStep

pytestmark = pytest.mark.instruction_set

FREQUENCIES = (1.0, 0.3, 0.01)
PLACES = st.integers(-3000, 3000)


def at(position: int) -> Turn:
    return turns(torch.tensor(position, dtype=torch.int32), FREQUENCIES)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(PLACES, PLACES, st.integers(0, 99))
def test_products_of_turned_vectors_depend_on_the_distance_only(first: int, second: int, seed: int) -> None:
    x, y = random(seed, 2, 8)
    found = turned(x, at(first)) @ turned(y, at(second))
    torch.testing.assert_close(found, turned(x, at(first - second)) @ y, atol=2e-3, rtol=0)
    torch.testing.assert_close(turned(turned(x, at(first)), at(-first)), x, atol=1e-4, rtol=0)
    assert torch.equal(turned(x, at(first))[6:], x[6:])


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)), min_size=1, max_size=3),
    st.integers(0, 6),
    st.integers(1, 9),
    st.integers(0, 99),
)
def test_expected_queries_are_the_moments_of_queries_turned_one_by_one(
    rows: list[tuple[int, int]], first: int, num_ahead: int, seed: int
) -> None:
    longest, total = max(1, *(n for _, n in rows)), max(1, sum(n for _, n in rows))
    q = random(seed, total, 2, 3, 8)
    begins = [sum(n for _, n in rows[:number]) for number in range(len(rows))]
    start, num_new, begin = (
        torch.tensor(x, dtype=torch.int32) for x in ([s for s, _ in rows], [n for _, n in rows], begins)
    )
    token = torch.clamp(begin[:, None] + torch.arange(longest, dtype=torch.int32), max=total - 1)
    chunk = ChunkStep(torch.arange(len(rows), dtype=torch.int32), start, num_new, token)
    position = torch.zeros(total, dtype=torch.int32)
    for (old, number), where in zip(rows, begins):
        position[where : where + number] = torch.arange(old, old + number)
    ahead = turns((start + num_new)[:, None] + torch.arange(num_ahead, dtype=torch.int32), FREQUENCIES)
    mean_ahead = Turn(ahead.cos.mean(dim=1), ahead.sin.mean(dim=1))
    found = future_queries(q, chunk, first, turns(-position, FREQUENCIES), mean_ahead)
    for row, ((old, number), where) in enumerate(zip(rows, begins)):
        own = [
            torch.stack(
                [turned(q[where + i], at(t - old - i)) for t in range(old + number, old + number + num_ahead)]
            ).mean(dim=0)
            for i in range(number)
            if old + i >= first
        ]
        samples = torch.stack(own) if own else torch.zeros(1, 2, 3, 8)
        apart = samples - samples.mean(dim=0)
        covariance = torch.einsum("nkgd,nkge->kgde", apart, apart) / len(samples)
        torch.testing.assert_close(found.mean[row], samples.mean(dim=0), atol=1e-4, rtol=0)
        torch.testing.assert_close(found.covariance[row], covariance, atol=1e-4, rtol=0)


@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 99))
def test_stored_keys_are_turned_to_their_ranks_among_those_that_are_kept(
    num_rows: int, num_slots: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    order = np.stack([rng.choice(4_000_000, num_slots, replace=False) for _ in range(2 * num_rows)])
    position = torch.from_numpy(order).view(num_rows, 2, num_slots).to(torch.int32)
    seen = torch.randint(0, num_slots + 1, (num_rows,), generator=generator)
    k, valid = random(seed, num_rows, 2, num_slots, 8), torch.arange(num_slots) < seen[:, None]
    table = turns(torch.arange(num_slots, dtype=torch.int32), FREQUENCIES)
    found = turned_by_rank(k, position, valid[:, None], table)
    for row in range(num_rows):
        for head in range(2):
            kept = position[row, head, : seen[row]].tolist()
            for slot, own in enumerate(kept):
                rank = sorted(kept).index(own)
                torch.testing.assert_close(found[row, head, slot], turned(k[row, head, slot], at(rank)))


def test_a_key_of_a_far_position_is_turned_back_without_loss() -> None:
    frequencies = tuple((10_000.0 ** (-torch.arange(4) / 4)).tolist())
    x, far = random(0, 8), torch.tensor(4_000_000, dtype=torch.int32)
    there, place = turned(x, turns(far, frequencies)), turns(torch.tensor(100), frequencies)
    found = turned(there, composed(turns(-far, frequencies), place))
    torch.testing.assert_close(found, turned(x, place), atol=1e-5, rtol=0)

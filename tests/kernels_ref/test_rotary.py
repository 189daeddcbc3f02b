"""Turned vectors, expected queries, and attention from two places, against definitions."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bias_builders import Leading
from kernels_ref import Scoring, normalise, of_stores
from kernels_ref.by_place import unique_placed
from kernels_ref.groups import RingStep
from kernels_ref.groups.column_sums import ChunkStep
from kernels_ref.groups.future_queries import future_queries
from kernels_ref.rotary import Turn, turned, turns
from kernels_ref.weighed import weighed

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


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(2, 9), st.integers(0, 99), st.booleans())
def test_attention_from_two_places_is_that_of_each_slot_from_its_own(
    num_rows: int, num_slots: int, seed: int, is_moved: bool
) -> None:
    num_placed = seed % num_slots
    q, other = random(seed, 2, num_rows, 2, 3, 8)
    k, v = random(seed + 1, 2, num_rows, 2, num_slots, 8)
    seen = torch.randint(0, num_slots + 1, (num_rows,), generator=torch.Generator().manual_seed(seed))
    valid = (torch.arange(num_slots) < seen[:, None])[:, None]
    v[~valid.expand(-1, 2, -1)] = float("nan")
    placed = other if is_moved else q
    nothing = torch.zeros(0, dtype=torch.int32)
    ring = RingStep(nothing, Leading(seen[:, None, None]), nothing)
    partial = unique_placed(q, placed, num_placed, of_stores(k, v), ring, Scoring())
    found = normalise(partial, torch.float32)
    if not is_moved:
        torch.testing.assert_close(
            found, normalise(weighed(q, k, v, valid, Scoring(), None)[0], torch.float32)
        )
    for row in range(num_rows):
        near = torch.arange(int(seen[row])) < num_placed
        for head in range(2):
            scores = torch.where(near, placed[row, head] @ k[row, head, : len(near)].T, 0)
            scores = torch.where(near, scores, q[row, head] @ k[row, head, : len(near)].T)
            expected = torch.softmax(scores, dim=-1) @ v[row, head, : len(near)]
            torch.testing.assert_close(found[row, head], expected, atol=1e-5, rtol=1e-4)

"""The algebra of partial attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_ref.partial import FLOOR, Partial, attend, empty, merge, normalise, select, sink_logits

pytestmark = pytest.mark.instruction_set

SETTINGS = settings(deadline=None, max_examples=60)


def random_partial(
    generator: torch.Generator, keys: int, shift: float = 0.0
) -> tuple[Partial, torch.Tensor, torch.Tensor]:
    """A partial over ``keys`` keys, with its scores ``[2, 1, 3, T]`` and values ``[2, 1, T, 4]``."""
    scores = torch.randn(2, 1, 3, keys, generator=generator) * 4 + shift
    values = torch.randn(2, 1, keys, 4, generator=generator)
    return attend(scores, None, values), scores, values


@SETTINGS
@given(st.integers(0, 10**6), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.permutations(range(5)))
def test_merging_in_any_order_equals_one_softmax(seed: int, sizes: list[int], order: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [random_partial(generator, size) for size in sizes]
    scores = torch.cat([p[1] for p in parts], dim=-1).double()
    values = torch.cat([p[2] for p in parts], dim=-2).double()
    expected = torch.softmax(scores, -1) @ values
    total = empty(torch.zeros(2, 1, 3, 4))
    for i in [i for i in order if i < len(parts)]:
        total = merge(parts[i][0], total)
    torch.testing.assert_close(normalise(total, torch.float64), expected, atol=1e-5, rtol=1e-5)


def test_empty_is_neutral_and_normalises_to_zero() -> None:
    nothing = empty(torch.zeros(2, 1, 3, 4))
    both = merge(nothing, nothing)
    assert all(torch.isfinite(x).all() for x in both)
    assert (normalise(both, torch.float32) == 0).all()
    some, _, _ = random_partial(torch.Generator().manual_seed(0), 5)
    for merged in (merge(some, nothing), merge(nothing, some)):
        for got, wanted in zip(merged, some):
            torch.testing.assert_close(got, wanted)


def test_a_row_that_sees_nothing_stays_empty_whatever_is_hidden() -> None:
    scores = torch.full((1, 1, 1, 4), torch.nan)
    hidden = torch.zeros(1, 1, 1, 4, dtype=torch.bool)
    partial = attend(scores, hidden, torch.ones(1, 1, 4, 2))
    assert partial.max.item() == pytest.approx(FLOOR)
    assert partial.sum.item() == 0
    assert (partial.attn == 0).all()


@SETTINGS
@given(st.integers(0, 10**6), st.floats(-1e4, 1e4))
def test_adding_a_constant_to_all_scores_changes_nothing(seed: int, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 1, 3, 6, generator=generator, dtype=torch.float64)
    values = torch.randn(2, 1, 6, 4, generator=generator, dtype=torch.float64)
    plain, moved = (normalise(attend(s, None, values), torch.float64) for s in (scores, scores + shift))
    torch.testing.assert_close(plain, moved, atol=1e-6, rtol=1e-6)


def test_log_sum_exp_of_a_partial_is_that_of_its_scores() -> None:
    partial, scores, _ = random_partial(torch.Generator().manual_seed(1), 7, shift=30.0)
    torch.testing.assert_close(partial.max + partial.sum.log(), torch.logsumexp(scores, -1))


def test_sink_logits_are_one_more_column_of_the_softmax_that_is_dropped() -> None:
    partial, scores, values = random_partial(torch.Generator().manual_seed(2), 6)
    logits = torch.tensor([[0.5, -3.0, 20.0]])
    with_sink = torch.cat([scores, logits[None, ..., None].expand(2, 1, 3, 1)], dim=-1)
    expected = torch.softmax(with_sink, -1)[..., :-1] @ values
    torch.testing.assert_close(normalise(sink_logits(logits, partial), torch.float32), expected)


def test_selecting_past_the_end_gives_the_empty_partial() -> None:
    partial, _, _ = random_partial(torch.Generator().manual_seed(3), 4)
    chosen = select(partial, torch.tensor([1, 2, 0]))
    for got, source in zip(chosen, partial):
        torch.testing.assert_close(got[0], source[1])
        torch.testing.assert_close(got[2], source[0])
    assert chosen.max[1].unique().item() == pytest.approx(FLOOR)
    assert (chosen.sum[1] == 0).all()

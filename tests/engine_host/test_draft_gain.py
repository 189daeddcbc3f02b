"""Number of drafts that a step verifies, by the gain of earlier ones."""

from __future__ import annotations

import random

import pytest

from hpu_duo.drafting.draft_gain import Acceptance, DraftLengths

LENS = (1, 4, 9)


def served(
    chance: float, ratios: dict[int, float], *, num_rows: int = 4, num_steps: int = 3000, seed: int = 1
) -> tuple[float, float, DraftLengths]:
    """Decode on a virtual clock; returns its seconds, those without drafts, and the choices' owner.

    Args:
        chance: that a token of a draft is accepted, given those before it.
        ratios: seconds of a step by its tokens of a row.
    """
    lengths, rng, seconds, num_tokens = DraftLengths(LENS), random.Random(seed), 0.0, 0
    for _ in range(num_steps):
        drafting = [row for row in range(num_rows) if not lengths.pauses(row)]
        size = lengths.choose(dict.fromkeys(drafting, 8), num_rows)
        taken = num_rows
        for row in drafting if size > 1 else ():
            accepted = next((n for n in range(size - 1) if rng.random() >= chance), size - 1)
            lengths.verified(row, size - 1, accepted)
            taken += accepted
        lengths.ran(num_rows, size, taken, ratios[size])
        seconds += ratios[size]
        num_tokens += taken
    return seconds, num_tokens / num_rows * ratios[1], lengths


@pytest.mark.parametrize("ratios", [{1: 1.0, 4: 1.9, 9: 3.2}, {1: 1.0, 4: 1.0, 9: 1.04}])
def test_drafts_that_are_never_accepted_cost_at_most_one_percent(ratios: dict[int, float]) -> None:
    seconds, plain, _ = served(0.0, ratios)
    assert seconds <= 1.01 * plain


def test_the_longest_rows_are_chosen_where_they_cost_nothing() -> None:
    seconds, plain, lengths = served(0.95, {1: 1.0, 4: 1.0, 9: 1.0})
    assert plain > 6 * seconds
    assert lengths.choose({0: 8}, 4) == 9


def test_rows_are_as_long_as_they_are_worth() -> None:
    _, _, lengths = served(0.6, {1: 1.0, 4: 1.2, 9: 3.2})
    assert lengths.choose(dict.fromkeys(range(4), 8), 4) == 4
    # A draft of one token is verified in the shortest row that holds it, or not at all.
    assert lengths.choose({0: 1}, 4) in (1, 4)


def test_what_becomes_right_is_verified_again() -> None:
    ratios = {1: 1.0, 4: 1.5, 9: 2.5}
    _, _, lengths = served(0.0, ratios, num_rows=1)
    seconds, num_tokens = 0.0, 0
    for _ in range(2000):
        drafts = {} if lengths.pauses(0) else {0: 8}
        size = lengths.choose(drafts, 1)
        if size > 1:
            lengths.verified(0, size - 1, size - 1)
        lengths.ran(1, size, size, ratios[size])
        seconds, num_tokens = seconds + ratios[size], num_tokens + size
    assert num_tokens > 2 * seconds


def test_chances_are_means_by_place() -> None:
    acceptance = Acceptance()
    assert acceptance.expected(2) == 1.0
    for _ in range(60):
        acceptance.add(4, 2)
    assert acceptance.expected(2) == pytest.approx(2, abs=0.01)
    assert acceptance.expected(8) == pytest.approx(2, abs=0.01)


def test_a_model_drafts_where_it_is_expected_to_be_right_more_often_than_the_text() -> None:
    lengths = DraftLengths(LENS)
    assert not lengths.prefers_model(0, 8, 4)
    assert lengths.prefers_model(0, 1, 4)
    for _ in range(20):
        lengths.verified(0, 8, 0)
    assert lengths.prefers_model(0, 8, 4)
    assert lengths.choose({0: 8}, 1, {0}) == 1  # no time is known
    for _ in range(20):
        lengths.verified(0, 4, 0, of_model=True)
        lengths.verified(0, 8, 8)
    assert not lengths.prefers_model(0, 8, 4)


def test_a_size_with_few_times_is_tried_more_often() -> None:
    """Its first steps may have been slow for other reasons."""
    lengths = DraftLengths(LENS)
    for size, seconds in ((1, 1.0), (4, 1.2), (9, 3.0)):
        for _ in range(8 if size < 9 else 2):
            lengths.verified(0, 8, 8)
            lengths.ran(4, size, 4 * size, seconds)
    assert lengths.choose(dict.fromkeys(range(4), 8), 4) == 9
    for _ in range(6):
        lengths.ran(4, 9, 36, 3.0)
    assert lengths.choose(dict.fromkeys(range(4), 8), 4) == 4


def test_a_slow_spell_of_the_machine_does_not_shorten_rows() -> None:
    """Shorter ones, which run seldom, only seem to be faster."""
    lengths = DraftLengths(LENS)
    for size, seconds in ((1, 1.0), (4, 1.3), (9, 1.8)):
        for _ in range(8):
            lengths.verified(0, 8, 8)
            lengths.ran(1, size, size, seconds)
    for _ in range(40):
        lengths.ran(1, 9, 9, 5.0)
    assert lengths.choose({0: 8}, 1) == 9
    for _ in range(40):
        lengths.ran(1, 9, 9, 5.0)
    assert lengths.choose({0: 8}, 1) == 4
    # All sizes have become slower.
    for size, seconds in ((1, 3.0), (4, 3.9), (1, 3.0), (4, 3.9)):
        lengths.ran(1, size, size, seconds)
    assert lengths.choose({0: 8}, 1) == 9

"""The fewest promoted heads, against every choice there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.heads import CountRule, HeadPattern, fewest_promotions

PUBLISHED = sorted((Path(__file__).parents[1] / "data" / "attn_patterns").iterdir())


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[str], CountRule, int]:
    """Needs, structures, a rule, and the KV heads of a layer."""
    num_ranks = draw(st.sampled_from([1, 1, 2, 3]))
    num_kv_heads = num_ranks * draw(st.integers(1, 4 if num_ranks == 1 else 2))
    num_layers = draw(st.integers(1, 5))
    needed = draw(st.lists(st.integers(0, num_kv_heads), min_size=num_layers, max_size=num_layers))
    structures = draw(st.lists(st.sampled_from("ab"), min_size=num_layers, max_size=num_layers))
    max_kinds = draw(st.none() | st.integers(len(set(structures)), 6))
    return needed, structures, CountRule(max_kinds, num_ranks), num_kv_heads


def every_choice(
    needed: Sequence[int], structures: Sequence[str], rule: CountRule, num_kv_heads: int
) -> Iterator[tuple[int, ...]]:
    for counts in product(range(num_kv_heads + 1), repeat=len(needed)):
        is_enough = all(count >= need for count, need in zip(counts, needed))
        is_even = all(count % rule.num_ranks == 0 for count in counts)
        num_kinds = len(set(zip(structures, counts)))
        if is_enough and is_even and (rule.max_kinds is None or num_kinds <= rule.max_kinds):
            yield counts


@given(problems())
def test_no_allowed_choice_promotes_fewer_heads(
    problem: tuple[list[int], list[str], CountRule, int],
) -> None:
    needed, structures, rule, num_kv_heads = problem
    allowed = set(every_choice(needed, structures, rule, num_kv_heads))
    chosen = fewest_promotions(needed, rule, structures)

    assert chosen in allowed
    assert sum(chosen) == min(map(sum, allowed))


@given(st.lists(st.integers(0, 9), max_size=20))
def test_without_bounds_every_layer_has_what_it_needs(needed: list[int]) -> None:
    assert fewest_promotions(needed, CountRule()) == tuple(needed)


def test_more_structures_than_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_layer_kinds of at least 3, .* got 2"):
        fewest_promotions([1, 1, 1], CountRule(2), ["a", "b", "c"])


@pytest.mark.parametrize(
    ("rule", "match"), [((0, 1), "max_layer_kinds of 1 or more, got 0"), ((None, 0), "num_ranks of 1")]
)
def test_a_bound_below_one_is_refused(rule: tuple[int | None, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CountRule(*rule)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
@pytest.mark.parametrize("sparsity", [0.25, 0.5, 0.75])
def test_a_published_pattern_is_promoted_to_few_kinds(path: Path, sparsity: float) -> None:
    pattern = HeadPattern.load(path).binarise(sparsity=sparsity)
    counts = fewest_promotions([kept for kept, _ in pattern.head_counts], CountRule(4))
    promoted = pattern.promote(counts)

    assert [kept for kept, _ in promoted.head_counts] == list(counts)
    assert len(set(counts)) <= 4
    assert promoted.mask[pattern.mask].all(), "nothing that retrieved streams now"
    assert promoted.num_promoted == promoted.mask.sum() - pattern.mask.sum()


def test_the_strongest_streaming_heads_are_promoted_and_of_equals_the_last() -> None:
    scores = np.array([[0.9, 0.1, 0.4, 0.4], [0.0, 0.2, 0.3, 0.1]])
    pattern = HeadPattern(scores, 1, 1, retrieval=np.array([[1, 0, 0, 0], [0, 0, 0, 0]], np.bool_))
    promoted = pattern.promote([2, 2])

    assert promoted.mask.tolist() == [[True, False, False, True], [False, True, True, False]]
    assert promoted.num_promoted == 3
    assert promoted.promote([4, 2]).num_promoted == 5, "promotions add up"


@pytest.mark.parametrize("counts", [[1, 5], [0, 4], [2], [2, 2, 2]])
def test_counts_that_a_pattern_cannot_have_are_refused(counts: list[int]) -> None:
    pattern = HeadPattern.all_streaming(2, 4, sink=1, recent=1)
    some = HeadPattern(pattern.scores, 1, 1, retrieval=np.array([[1, 0, 0, 0]] * 2, np.bool_))
    with pytest.raises(ValueError, match="expected"):
        some.promote(counts)

"""Workloads of the benchmark of the prefix cache, which have nothing in common but what they say."""

from __future__ import annotations

from itertools import combinations

import pytest

from benchmarks.prefix_cache import DOCUMENT, WORKS, Tokens, same_tokens

SHARED = {
    "16 at once, 1,024 tokens shared, 64 of their own": 1024,
    "8 one after the other, 1,500 of 2,200 tokens shared": 1500,
    "8 one after the other, 1,600 of 2,200 tokens shared": 1600,
    "chat of 20 turns": 0,
    "16 at once, nothing shared": 0,
    "8 questions to a document of 3,968 tokens, in a context": DOCUMENT,
}
CHANCE = 2
"""Tokens that two random texts may begin alike with."""


def num_common(one: list[int], other: list[int]) -> int:
    return next(
        (at for at, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other))
    )


@pytest.mark.parametrize("name", WORKS)
def test_prompts_of_a_round_share_what_their_workload_says(name: str) -> None:
    prompts = WORKS[name].texts(Tokens(name, 1))
    for one, other in combinations(prompts, 2):
        assert SHARED[name] <= num_common(one, other) <= SHARED[name] + CHANCE


def test_prompts_of_other_rounds_and_workloads_share_nothing() -> None:
    found = {(name, number): WORKS[name].texts(Tokens(name, number)) for name in WORKS for number in range(4)}
    documents = [[Tokens("files", number).draw(DOCUMENT)] for number in range(4)]
    for ours, others in combinations([*found.values(), *documents], 2):
        assert max(num_common(one, other) for one in ours for other in others) <= CHANCE


@pytest.mark.parametrize("name", WORKS)
def test_engines_get_the_same_prompts_in_a_round(name: str) -> None:
    one, other = (WORKS[name].texts(Tokens(name, 2)) for _ in range(2))
    assert one == other


def test_answers_with_other_tokens_are_an_error() -> None:
    assert same_tokens([[1, 2], [3]], [[1, 2], [3]]) == 2
    assert same_tokens([[1, 2], [3]], [[1, 2], [4]], "bfloat16") == 1
    with pytest.raises(ValueError, match="got other ones in 1"):
        same_tokens([[1, 2], [3]], [[1, 2], [4]])

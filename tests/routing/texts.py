"""Prompts with much in common, drawn at random, and a router of each kind."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from hpu_duo.fleet.routing import RoutedRequest

RUNS = st.builds(lambda ones, twos: [1] * ones + [2] * twos, st.integers(0, 5), st.integers(0, 4))
TEXTS = st.one_of(RUNS, st.lists(st.sampled_from([1, 2]), max_size=9))
USERS = st.sampled_from(["ann", "bob", None])
ROUTERS = st.sampled_from(
    [
        *("e2", "e2:capacity=12,min_cached=0"),
        "e2:capacity=12,window_s=3,imbalance=1,growth=1,min_cached=0",
        *("d2lpm", "d2lpm:quantum=3,min_cached=0", "d2lpm:quantum=inf,capacity=7,min_cached=0"),
        *("cache-aware", "cache-aware:threshold=0,uneven_by=1,capacity=5,min_cached=0"),
        *("least-loaded", "round-robin"),
    ]
)


def request_of(name: object, tokens: Sequence[int], user: str | None = None) -> RoutedRequest:
    """A request of token ids."""
    return RoutedRequest.of_tokens(str(name), tokens, user)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common prefix, counted one by one."""
    num = 0
    for one, other in zip(first, second):
        if one != other:
            break
        num += 1
    return num

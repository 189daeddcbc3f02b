"""The index finds the latest occurrences of the end of a text, whatever pieces it was given in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.drafting.text_index import TextIndex


def occurrences(text: list[int], end: list[int], gram: int, oldest: int = 0) -> list[tuple[int, int]]:
    """Places behind each earlier occurrence of the last tokens, the latest first, and equal tokens before."""
    found = []
    for place in range(len(text) - 1, gram + oldest - 1, -1):
        length = 0
        while length < min(len(end), place - oldest) and text[place - 1 - length] == end[-1 - length]:
            length += 1
        if length >= gram:
            found.append((place, length))
    return found


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), min_size=2, max_size=120),
    cuts=st.lists(st.integers(1, 40), max_size=5),
    gram=st.integers(1, 4),
    depth=st.integers(1, 8),
)
def test_matches_are_those_of_a_plain_search(text: list[int], cuts: list[int], gram: int, depth: int) -> None:
    index, done = TextIndex(np.array(text, np.int32), gram), 0
    for cut in [*cuts, len(text)]:
        done = min(len(text), done + cut)
        index.extend(done)
    end = np.array(text[-max(depth, gram) :], np.int32)
    found = index.find(end, len(text))
    pairs = [] if found is None else list(zip(found.places.tolist(), found.lengths.tolist()))
    assert pairs == occurrences(text, end.tolist(), gram)


def test_a_window_forgets_its_oldest_tokens() -> None:
    rng = np.random.default_rng(5)
    text, size = rng.integers(0, 5, 900).tolist(), 128
    tokens = np.zeros(size, np.int32)
    index, done = TextIndex(tokens, 2), 0
    for cut in (40, 88, 1, 5, 60, 128, 17, 3, 100):
        tokens[np.arange(done, done + cut) % size] = text[done : done + cut]
        done += cut
        index.extend(done)
        oldest = max(0, done - size)
        end = text[done - 4 : done]
        found = index.find(np.array(end, np.int32), 1000)
        pairs = [] if found is None else list(zip(found.places.tolist(), found.lengths.tolist()))
        assert pairs == occurrences(text[:done], end, 2, oldest)


def test_a_text_that_ends_goes_on_as_it_has() -> None:
    index = TextIndex(np.array([9, 1, 2, 3, 1, 2, 3], np.int32), 2)
    index.extend(7)
    found = index.find(np.array([2, 3], np.int32), 4)
    assert found is not None
    assert index.following(found.places, 7).tolist() == [[1, 2, 3, 1, 2, 3, 1]]


@pytest.mark.parametrize("num_tokens", [4096, 32_768])
def test_an_index_takes_twelve_bytes_a_token(num_tokens: int) -> None:
    index = TextIndex(np.zeros(num_tokens, np.int32), 2)
    index.extend(num_tokens)
    assert index.num_bytes <= 12 * num_tokens


def test_a_text_that_is_known_to_come_is_linked_once() -> None:
    tokens = np.zeros(10_000, np.int32)
    index = TextIndex(tokens, 2, 10_000)
    num_bytes, calls = index.num_bytes, list[tuple[int, int]]()
    index._link_all = lambda *ends: calls.append(ends)  # type: ignore[method-assign]
    for end in range(2500, 10_001, 2500):
        index.extend(end)
    assert (calls, index.num_bytes) == ([(2, 2500), (2500, 5000), (5000, 7500), (7500, 10_000)], num_bytes)

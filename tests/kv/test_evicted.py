"""Evicted prefixes are remembered, up to a number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.kv.prefix import EvictedPrefixes
from hpu_duo.kv.prefix_tree import PrefixTree


@given(st.integers(0, 5), st.lists(st.integers(0, 8)))
def test_the_latest_are_remembered_and_no_more(capacity: int, digests: list[int]) -> None:
    evicted = EvictedPrefixes(capacity)
    for digest in digests:
        evicted.add(digest)
    latest = list(dict.fromkeys(reversed(digests)))[:capacity]
    assert len(evicted) == len(latest)
    for digest in {*digests}:
        size = len(evicted)
        evicted.discard(digest)
        assert (size - len(evicted) == 1) is (digest in latest)


@given(st.integers(0, 5), st.integers(0, 5))
def test_blocks_behind_what_is_cached_are_counted_up_to_the_first_one_that_never_was(
    num_cached: int, num_evicted: int
) -> None:
    keys = [str(number).encode() for number in range(num_cached + num_evicted)]
    tree, evicted = PrefixTree(1), EvictedPrefixes(20)
    node = tree.root("salt")
    nodes = [node]
    for key in keys:
        node = tree.add(node, key, 0)
        nodes.append(node)
    for node in reversed(nodes[num_cached + 1 :]):
        evicted.add(node.digest)
        tree.remove(node)
    end = nodes[num_cached]
    assert evicted.num_following(end.digest, [*keys[num_cached:], b"new", *keys]) == num_evicted
    assert evicted.num_following(end.digest, [b"new", *keys[num_cached:]]) == 0
    other = tree.root("other salt")
    assert evicted.num_following(other.digest, keys) == 0

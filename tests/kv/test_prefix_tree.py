"""The tree of prefixes: what it matches, and whom it gives up first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.kv.prefix_tree import PrefixNode, PrefixTree

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=12)


def _enter(tree: PrefixTree, text: list[int], size: int, namespace: str | None = None) -> PrefixNode:
    tokens, node = np.array(text, np.int32), tree.root(namespace)
    for ordinal in range(len(text) // size):
        key = tree.key(tokens, ordinal)
        known = node.children.get(key)
        node = tree.add(node, key, len(tree)) if known is None else known
    if node.depth:
        tree.use(node)
    return node


@given(texts=TEXTS, asked=st.lists(st.integers(0, 2), max_size=9), size=st.integers(1, 3))
def test_a_match_is_the_longest_common_beginning_in_whole_blocks(
    texts: list[list[int]], asked: list[int], size: int
) -> None:
    tree = PrefixTree(size)
    for text in texts:
        _enter(tree, text, size)
    known = {tuple(text[:end]) for text in texts for end in range(0, len(text) + 1, size)}
    longest = max((end for end in range(0, len(asked) + 1, size) if tuple(asked[:end]) in known), default=0)
    path = tree.match(None, np.array(asked, np.int32))
    assert [node.depth for node in path] == list(range(1, longest // size + 1))
    assert len(tree) == len(list(tree)) == len(known - {()})
    assert not tree.match("another", np.array(asked, np.int32))


@given(texts=TEXTS, size=st.integers(1, 3), data=st.data())
def test_leaves_go_in_order_of_use_and_those_that_may_not_go_stay(
    texts: list[list[int]], size: int, data: st.DataObject
) -> None:
    tree = PrefixTree(size)
    for text in texts:
        _enter(tree, text, size)
    nodes = list(tree)
    held = data.draw(st.sets(st.sampled_from(nodes), max_size=3)) if nodes else set()
    stays = {node for each in held for node in each.path}
    while (node := tree.least_used(lambda each: each not in held)) is not None:
        leaves = [each for each in tree if not each.children and each not in held]
        assert node.last_used == min(each.last_used for each in leaves)
        tree.remove(node)
    assert set(tree) == stays


@given(
    steps=st.lists(
        st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 1), max_size=4), st.booleans())
    ),
    size=st.integers(1, 3),
)
def test_a_namespace_is_known_as_long_as_it_holds_a_block(
    steps: list[tuple[str, list[int], bool]], size: int
) -> None:
    tree, ends = PrefixTree(size), dict[tuple[str, bytes], PrefixNode]()
    for namespace, text, enters in steps:
        if enters:
            end = _enter(tree, text, size, namespace)
            for node in end.path:
                ends[namespace, b"".join(each.key for each in reversed(list(node.path)))] = node
        else:
            while leaves := [
                place for place, node in ends.items() if place[0] == namespace and not node.children
            ]:
                tree.remove(ends.pop(leaves[0]))
        assert tree.num_namespaces == len({namespace for namespace, _ in ends})
        assert set(tree) == set(ends.values())
        for (known, key), node in ends.items():
            assert tree.match(known, np.frombuffer(key, np.int32))[-1] is node


def test_two_beginnings_of_one_namespace_do_not_become_two_trees() -> None:
    tree = PrefixTree(1)
    one, other = tree.root("a"), tree.root("a")
    tree.add(one, b"1", 0)
    with pytest.raises(ValueError, match="namespace 'a' has another empty prefix"):
        tree.add(other, b"2", 1)
    assert tree.root("a") is one


def test_what_longer_texts_begin_with_is_not_removed() -> None:
    tree = PrefixTree(1)
    end = _enter(tree, [1, 2], 1)
    assert end.parent is not None
    with pytest.raises(ValueError, match="longer ones begin with"):
        tree.remove(end.parent)
    with pytest.raises(ValueError, match="in the tree already"):
        tree.add(end.parent, end.key, 7)

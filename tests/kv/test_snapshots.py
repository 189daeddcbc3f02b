"""Rows of snapshots go to the prefixes that save most."""

from __future__ import annotations

import numpy as np
import pytest

from hpu_duo.kv.prefix_tree import NO_BLOCK, PrefixNode, PrefixTree
from hpu_duo.kv.snapshots import Snapshots

ROWS = range(4, 8)


def _enter(tree: PrefixTree, *keys: str) -> PrefixNode:
    """The prefix of these blocks, which is used now."""
    node = tree.root(None)
    for key in keys:
        known = node.children.get(key.encode())
        node = tree.add(node, key.encode(), NO_BLOCK) if known is None else known
    tree.use(node)
    return node


def _place(snapshots: Snapshots, tree: PrefixTree, node: PrefixNode) -> PrefixNode | None:
    return snapshots.place(node, tree, lambda _: False)


def test_the_snapshot_that_saves_fewest_tokens_goes_first_and_of_equal_ones_the_oldest() -> None:
    tree, snapshots = PrefixTree(1), Snapshots(ROWS)
    nodes = [_enter(tree, *name) for name in ("abcdefgh", "ijklmnop", "qr", "stuvwxyz")]
    for node in nodes:
        assert _place(snapshots, tree, node) is None
    assert _place(snapshots, tree, _enter(tree, *"12345678")) is nodes[2]
    assert _place(snapshots, tree, _enter(tree, *"ABCDEFGH")) is nodes[0]


def test_texts_that_come_once_take_no_rows_of_prefixes_that_were_asked_for() -> None:
    tree, snapshots = PrefixTree(1), Snapshots(ROWS)
    hot = _enter(tree, "a", "b")
    hot.is_shared = True
    _place(snapshots, tree, hot)
    for number in range(20):
        _place(snapshots, tree, _enter(tree, *(f"{number} {place}" for place in range(50))))
    assert hot.snapshot is not None
    assert snapshots.num_used == len(ROWS)


def test_prefixes_that_were_asked_for_take_half_of_the_rows_and_no_more() -> None:
    tree, snapshots = PrefixTree(1), Snapshots(ROWS)
    shared = []
    for number in range(6):
        shared.append(_enter(tree, f"{number}"))
        shared[-1].is_shared = True
        _place(snapshots, tree, shared[-1])
    once = [_enter(tree, f"once {number}") for number in range(2)]
    lost = [_place(snapshots, tree, node) for node in once]
    assert lost == shared[2:4]
    assert all(node.snapshot is not None for node in (*once, *shared[4:]))


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3])
def test_there_is_a_place_unless_all_rows_are_held(num_rows: int) -> None:
    tree, snapshots = PrefixTree(1), Snapshots(range(num_rows))
    assert snapshots.has_place(lambda _: False) is (num_rows > 0)
    nodes = [_enter(tree, str(number)) for number in range(num_rows)]
    for node in nodes:
        _place(snapshots, tree, node)
    assert snapshots.has_place(lambda _: False) is (num_rows > 0)
    assert snapshots.has_place(lambda _: True) is False
    assert snapshots.place(_enter(tree, "new"), tree, lambda _: True) is None
    assert [node.snapshot is None for node in nodes] == [False] * num_rows


def test_whatever_happens_rows_are_handed_out_once() -> None:
    generator = np.random.default_rng(0)
    tree, snapshots = PrefixTree(1), Snapshots(ROWS)
    for _ in range(500):
        node = _enter(tree, *(str(key) for key in generator.integers(0, 3, generator.integers(1, 6))))
        if node.snapshot is None:
            _place(snapshots, tree, node)
        elif generator.random() < 0.3:
            snapshots.remove(node)
        rows = [each.snapshot for each in snapshots.nodes]
        assert len(rows) == len({*rows})
        assert {*rows} <= {*ROWS}

"""Each rule sees what its definition says, and its tiles are what their pairs are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bias_builders import (
    BlockTable,
    Dilated,
    Fixed,
    Rule,
    RuleIntersection,
    RuleUnion,
    Strided,
    Tile,
    Window,
    decode_rule,
    encode_rule,
    rule_terms,
    sees_by_head,
)
from tests.bias_builders.plain_rules import plain, rules, tables

LENGTH = 40
POSITIONS = np.arange(LENGTH)


def expected(rule: Rule) -> np.ndarray:
    return np.array([[plain(rule, i, j) for j in range(LENGTH)] for i in range(LENGTH)])


def tiles() -> st.SearchStrategy[Tile]:
    span = st.tuples(st.integers(0, LENGTH - 1), st.integers(0, LENGTH - 1)).map(sorted)
    return st.tuples(span, span).map(lambda both: Tile(*both[0], *both[1]))


def seen_pairs(seen: np.ndarray, tile: Tile) -> np.ndarray:
    return seen[tile.first_query : tile.last_query + 1, tile.first_key : tile.last_key + 1]


@given(rules() | tables())
def test_a_rule_sees_what_its_plain_definition_says(rule: Rule) -> None:
    seen = rule.sees(POSITIONS[:, None], POSITIONS[None])
    assert np.array_equal(seen, expected(rule))
    assert seen.diagonal().all(), "a token sees itself"
    of_tensors = rule.sees(
        *(torch.from_numpy(x.astype(np.int32)) for x in (POSITIONS[:, None], POSITIONS[None]))
    )
    assert of_tensors.dtype == torch.bool
    assert np.array_equal(of_tensors.numpy(), seen)


@given(rules() | tables(), tiles())
def test_a_tile_is_empty_or_full_only_if_its_pairs_are(rule: Rule, tile: Tile) -> None:
    pairs = seen_pairs(expected(rule), tile)
    assert rule.may_see(tile) or not pairs.any()
    assert pairs.all() or not rule.sees_all(tile)


@pytest.mark.parametrize(
    "rule", [Window(0, 1), Window(0, 7), Window(3, 5), Dilated(4, 3), Dilated(6, 1), Strided(1), Strided(6)]
)
def test_the_tiles_of_rules_by_distance_are_told_exactly(rule: Rule) -> None:
    seen, spans = expected(rule), [(a, b) for a in range(0, 24, 3) for b in range(a, min(a + 9, 24))]
    for queries in spans:
        for keys in spans:
            tile = Tile(*queries, *keys)
            pairs = seen_pairs(seen, tile)
            told = rule.may_see(tile), rule.may_see(tile) and rule.sees_all(tile)
            assert told == (pairs.any(), pairs.all()), tile


@given(rules() | tables(), st.lists(tiles(), min_size=1, max_size=6))
def test_tiles_are_told_one_by_one_and_in_arrays(rule: Rule, some: list[Tile]) -> None:
    together = Tile(*(np.array(x) for x in zip(*some)))
    for told in (rule.may_see, rule.sees_all):
        assert np.broadcast_to(told(together), len(some)).tolist() == [bool(told(tile)) for tile in some]


@given(rules(), st.integers(0, LENGTH), st.integers(0, LENGTH))
def test_distances_out_of_reach_have_no_pair_behind_the_sinks(rule: Rule, near: int, more: int) -> None:
    if rule.reaches(near, near + more):
        return
    seen = expected(rule)
    distance = POSITIONS[:, None] - POSITIONS[None]
    among = (distance >= near) & (distance <= near + more) & (rule.sink <= POSITIONS)[None]
    assert not (seen & among).any()


@given(rules() | tables() | st.tuples(rules(), tables()).map(RuleUnion))
def test_a_rule_is_written_in_numbers_and_read_again(rule: Rule) -> None:
    assert decode_rule(encode_rule(rule)) == rule
    assert decode_rule(encode_rule(None)) is None


@given(rules())
def test_terms_are_a_union_of_intersections_of_the_same_visibility(rule: Rule) -> None:
    found = np.zeros((LENGTH, LENGTH), bool)
    for term in rule_terms(rule):
        leaves = [decode_rule(leaf) for leaf in term]
        found |= np.logical_and.reduce([expected(leaf) for leaf in leaves if leaf is not None])
    assert np.array_equal(found, expected(rule))


@settings(max_examples=40)
@given(rules(), rules())
def test_union_and_intersection_are_those_of_sets_and_distinct_by_key(a: Rule, b: Rule) -> None:
    assert np.array_equal(expected(RuleUnion((a, b))), expected(a) | expected(b))
    assert np.array_equal(expected(RuleIntersection((a, b))), expected(a) & expected(b))
    assert (a.key == b.key) is (a == b)
    assert RuleUnion((a, b)).key != RuleIntersection((a, b)).key


@given(st.lists(tables(), min_size=1, max_size=3))
def test_each_head_may_have_a_table_of_its_own(heads: list[BlockTable]) -> None:
    query, key = (torch.arange(LENGTH, dtype=torch.int32)[shape] for shape in ((..., None), (None, ...)))
    seen = sees_by_head(heads, query, key)
    assert seen.shape == (len(heads), LENGTH, LENGTH)
    assert all(np.array_equal(seen[number].numpy(), expected(table)) for number, table in enumerate(heads))


@given(tables())
def test_a_table_of_booleans_is_the_same_table(table: BlockTable) -> None:
    size = len(table.rows)
    seen = np.zeros((size, size), bool)
    for number, row in enumerate(table.rows):
        seen[number, list(row)] = True
    assert BlockTable.of(table.block, seen | np.triu(np.ones_like(seen), 1)) == table


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dilated(0, 2), "width >= 1, got 0"),
        (lambda: Dilated(2, 0), "dilation >= 1, got 0"),
        (lambda: Strided(0), "stride >= 1, got 0"),
        (lambda: Fixed(4, 5), "summary of at most stride=4, got 5"),
        (lambda: RuleUnion((Strided(2),)), "2 rules or more, got 1"),
        (lambda: BlockTable(4, ((1,),)), "key blocks of 0 to 0 in row 0"),
        (lambda: BlockTable.of(4, np.ones((2, 3), bool)), "square table"),
        (lambda: rule_terms(BlockTable(4, ((0,),))), "closed form, got block_table"),
    ],
)
def test_numbers_that_make_no_rule_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

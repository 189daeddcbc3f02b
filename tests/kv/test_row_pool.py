from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.kv.pool import RowMove, RowPool


def test_rows_are_handed_out_lowest_free_one_first() -> None:
    pool: RowPool[str] = RowPool(3)
    assert [pool.acquire(name) for name in "abc"] == [0, 1, 2]
    pool.release(1)
    assert pool.acquire("d") == 1


def test_compact_moves_the_highest_used_row_into_the_lowest_hole() -> None:
    pool: RowPool[str] = RowPool(6)
    for name in "abcdef":
        pool.acquire(name)
    for row in (0, 2, 4):
        pool.release(row)
    assert pool.compact() == [RowMove("f", 5, 0), RowMove("d", 3, 2)]
    assert [pool.owner(row) for row in range(6)] == ["f", "b", "d", None, None, None]


def test_compact_of_dense_rows_moves_nothing() -> None:
    pool: RowPool[str] = RowPool(3)
    for name in "abc":
        pool.acquire(name)
    pool.release(2)
    assert pool.compact() == []


def test_a_full_pool_says_so() -> None:
    pool: RowPool[str] = RowPool(1)
    pool.acquire("a")
    with pytest.raises(ValueError, match="all 1 are in use"):
        pool.acquire("b")


@pytest.mark.parametrize("row", [-1, 1, 2])
def test_a_row_without_owner_cannot_be_released(row: int) -> None:
    pool: RowPool[str] = RowPool(2)
    pool.acquire("a")
    with pytest.raises(ValueError, match=f"row {row} is not a used row"):
        pool.release(row)


def test_a_pool_needs_a_row() -> None:
    with pytest.raises(ValueError, match="got 0"):
        RowPool(0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_moves_carry_the_content_of_every_owner_to_the_row_it_is_said_to_have(choices: list[int]) -> None:
    pool: RowPool[int] = RowPool(5)
    content: dict[int, int] = {}
    row_of: dict[int, int] = {}
    for owner, choice in enumerate(choices):
        if choice < 5 and pool.num_free:
            row_of[owner] = pool.acquire(owner)
            content[row_of[owner]] = owner
        elif choice < 8 and row_of:
            pool.release(row_of.pop(sorted(row_of)[choice % len(row_of)]))
        else:
            for move in pool.compact():
                content[move.dst] = content[move.src]
                row_of[move.owner] = move.dst
            assert sorted(row_of.values()) == list(range(len(row_of)))
        assert all(content[row] == pool.owner(row) == owner for owner, row in row_of.items())
        assert pool.num_used == len(row_of)

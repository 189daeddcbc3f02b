"""A tile sees its own block, its neighbour, the first one, and those of the highest estimates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bias_builders import TopBlocks, highest


def plain(masses: list[float], tile: int, most: int) -> set[int]:
    """Blocks before a tile that it sees, by sorting them; of equal ones the later."""
    others = [block for block in range(tile) if block not in (0, tile - 1)]
    others.sort(key=lambda block: (-masses[block], -block))
    always = {0, tile - 1} if tile else set()
    return always | {*others[: max(0, most - 1 - len(always))]}


@given(
    masses=st.lists(
        st.lists(st.sampled_from([0.0, 1e-30, 0.25, 0.5, 1.0, 3.5]), min_size=9, max_size=9),
        min_size=1,
        max_size=3,
    ),
    most=st.integers(3, 12),
    tile=st.integers(0, 9),
    order=st.permutations(range(9)),
)
def test_choices_are_those_of_a_sort_whatever_the_order_of_blocks(
    masses: list[list[float]], most: int, tile: int, order: list[int]
) -> None:
    block = torch.tensor(order, dtype=torch.int32)
    mass = torch.tensor(masses)[:, block.long()]
    # Blocks behind the tile, and those of other texts, may be estimated as anything.
    may = block < tile
    mass = torch.where(may, mass, float("nan"))
    chosen = TopBlocks(most).chosen(mass[None], may[None], torch.tensor([tile], dtype=torch.int32), block)
    assert chosen.shape == (1, len(masses), 9)
    for line, of_head in zip(chosen[0], masses):
        assert {*block[line].tolist()} == plain(of_head, tile, most)


def test_of_equal_ranks_those_of_the_highest_position_are_marked() -> None:
    rank = torch.tensor([1.0, 2.0, 1.0, 1.0, -1.0])
    position = torch.tensor([9, 0, 4, 6, 70], dtype=torch.int32)
    marked = highest(rank, position, rank > 0, 3)
    assert marked.tolist() == [True, True, False, True, False]


def test_fewer_than_the_first_the_own_and_its_neighbour_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected blocks >= 3.*got 2"):
        TopBlocks(2)

"""Shared blocks are grouped by who sees how much of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from kernels_ref.sdpa.prefill import TokenPlaces, readers_of

VISIBLE = arrays(
    np.int64, array_shapes(min_dims=2, max_dims=2, max_side=7), elements=st.sampled_from([0, 2, 4])
)


@given(VISIBLE)
def test_every_pair_of_a_row_and_a_block_that_it_sees_comes_once(visible_RX: npt.NDArray[np.int64]) -> None:
    found: Counter[tuple[int, int, int]] = Counter()
    groups = list(readers_of(visible_RX))
    for readers in groups:
        found.update((row, int(block), readers.num_slots) for row in readers.rows for block in readers.blocks)
        assert [*readers.blocks] == sorted(readers.blocks)
    wanted = {(r, x, int(n)) for (r, x), n in np.ndenumerate(visible_RX) if n}
    assert found == Counter(dict.fromkeys(wanted, 1))
    assert len({(readers.rows, readers.num_slots) for readers in groups}) == len(groups)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=5), st.data())
def test_tokens_of_rows_are_found_wherever_these_lie(
    rows: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Rows of so many tokens, each behind a gap."""
    ends = np.cumsum([gap + num_new for gap, num_new in rows])
    num_new = np.array([each for _, each in rows])
    chosen = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1)))
    place = TokenPlaces(ends - num_new, num_new).of(chosen)
    wanted = [token for row in chosen for token in range(ends[row] - num_new[row], ends[row])]
    assert torch.arange(int(ends[-1]) + 1)[place].tolist() == wanted

"""Places of heads after the permutation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.heads import HeadLayout

GROUPS = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@given(groups=GROUPS, group_size=st.integers(1, 4))
def test_heads_of_a_group_are_neighbours_and_keep_their_order(groups: list[int], group_size: int) -> None:
    layout = HeadLayout.by_group(np.array(groups), len(groups) * group_size)

    assert [groups[head] for head in layout.kv_order] == sorted(groups)
    for group in set(groups):
        heads = [head for head in layout.kv_order if groups[head] == group]
        assert heads == sorted(heads)
    assert layout.num_kv_heads == len(groups)


@given(groups=GROUPS, group_size=st.integers(1, 4))
def test_query_heads_stay_with_their_kv_head(groups: list[int], group_size: int) -> None:
    layout = HeadLayout.by_group(np.array(groups), len(groups) * group_size)

    assert sorted(layout.query_order) == list(range(layout.num_heads))
    for new, old in enumerate(layout.query_order):
        assert old // group_size == layout.kv_order[new // group_size]
        assert old % group_size == new % group_size


@given(groups=GROUPS)
def test_the_layout_is_the_identity_exactly_when_groups_are_in_order(groups: list[int]) -> None:
    layout = HeadLayout.by_group(np.array(groups), len(groups))

    assert layout.is_identity == (groups == sorted(groups))


def test_orders_that_lose_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="permutation"):
        HeadLayout(kv_order=(0, 0), num_heads=2)
    with pytest.raises(ValueError, match="permutation"):
        HeadLayout(kv_order=(), num_heads=2)
    with pytest.raises(ValueError, match="num_heads to be a multiple of 4 KV heads, got 6"):
        HeadLayout.by_group([0, 1, 0, 1], num_heads=6)
    with pytest.raises(ValueError, match=r"int \[num_kv_heads\], got bool \[2\]"):
        HeadLayout.by_group(np.array([False, True]), num_heads=2)

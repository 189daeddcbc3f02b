"""Where heads lie after the permutation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.heads import HeadLayout, HeadPattern, lay_out

MASK = st.lists(st.booleans(), min_size=1, max_size=9)


@given(mask=MASK, group_size=st.integers(1, 4))
def test_retrieval_heads_come_first_and_keep_their_order(mask: list[bool], group_size: int) -> None:
    layout = HeadLayout.from_mask(np.array(mask), len(mask) * group_size)
    front, back = layout.kv_order[: layout.num_retrieval], layout.kv_order[layout.num_retrieval :]

    assert [mask[head] for head in front] == [True] * mask.count(True)
    assert [mask[head] for head in back] == [False] * mask.count(False)
    assert list(front) == sorted(front)
    assert list(back) == sorted(back)
    assert layout.num_streaming == mask.count(False)
    assert layout.num_kv_heads == len(mask)


@given(mask=MASK, group_size=st.integers(1, 4))
def test_query_heads_stay_with_their_kv_head(mask: list[bool], group_size: int) -> None:
    layout = HeadLayout.from_mask(np.array(mask), len(mask) * group_size)

    assert sorted(layout.query_order) == list(range(layout.num_heads))
    for new, old in enumerate(layout.query_order):
        assert old // group_size == layout.kv_order[new // group_size]
        assert old % group_size == new % group_size
        assert mask[old // group_size] == (new < layout.num_retrieval_queries)


@given(mask=MASK, group_size=st.integers(1, 4))
def test_the_inverse_puts_every_head_back(mask: list[bool], group_size: int) -> None:
    layout = HeadLayout.from_mask(np.array(mask), len(mask) * group_size)

    assert [layout.kv_order[new] for new in layout.kv_inverse] == list(range(len(mask)))
    assert [layout.query_order[new] for new in layout.query_inverse] == list(range(layout.num_heads))


@given(mask=MASK)
def test_the_layout_is_the_identity_exactly_when_the_mask_is_sorted(mask: list[bool]) -> None:
    layout = HeadLayout.from_mask(np.array(mask), len(mask))

    assert layout.is_identity == (mask == sorted(mask, reverse=True))


def test_lay_out_gives_every_layer_its_own_layout() -> None:
    pattern = HeadPattern(scores=np.array([[0, 1], [1, 1], [0, 0]]), sink=1, recent=1).binarise(threshold=0.5)

    assert [(layout.kv_order, layout.num_retrieval) for layout in lay_out(pattern, num_heads=4)] == [
        ((1, 0), 1),
        ((0, 1), 2),
        ((0, 1), 0),
    ]


def test_lay_out_refuses_a_raw_pattern_and_heads_that_do_not_divide() -> None:
    pattern = HeadPattern.random(2, 4, seed=0)

    with pytest.raises(ValueError, match="expected a binarised pattern"):
        lay_out(pattern, num_heads=8)
    with pytest.raises(ValueError, match="num_heads to be a multiple of 4 KV heads, got 6"):
        lay_out(pattern.binarise(sparsity=0.5), num_heads=6)


def test_orders_that_lose_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="permutation"):
        HeadLayout(kv_order=(0, 0), num_retrieval=1, num_heads=2)
    with pytest.raises(ValueError, match="permutation"):
        HeadLayout(kv_order=(), num_retrieval=0, num_heads=2)
    with pytest.raises(ValueError, match=r"num_retrieval in \[0, 2\], got 3"):
        HeadLayout(kv_order=(0, 1), num_retrieval=3, num_heads=2)
    with pytest.raises(ValueError, match=r"bool mask of shape \[num_kv_heads\], got int64 \[2\]"):
        HeadLayout.from_mask(np.array([0, 1]), num_heads=2)

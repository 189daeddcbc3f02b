from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.sampling import PenaltyState, SamplingBatch, SamplingParams, SamplingRoute, SamplingRow
from hpu_duo.sampling.batch import RowTensors, RowValues
from hpu_duo.sampling.rows import FORBIDDEN

GREEDY = SamplingRow(SamplingParams(temperature=0))
V = 100


def test_an_all_greedy_batch_sends_nothing_and_is_built_once() -> None:
    batch = SamplingBatch.build([GREEDY, None, GREEDY], V)
    assert batch.route == SamplingRoute(3, V)
    assert batch.floats.size == 0
    assert SamplingBatch.build([None, GREEDY, None], V) is batch


def test_device_rows_are_the_host_rows_and_the_uniform() -> None:
    assert RowTensors._fields == (*RowValues._fields, "uniform")


def test_min_tokens_forbids_eos_and_stop_ids_until_it_is_reached() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[7, 5])
    batch = SamplingBatch.build([GREEDY, SamplingRow(params, 0, 1, None, (5, 9))], V)
    values, rows, tokens = batch.floats.reshape(3, 16)
    assert (rows[:3].tolist(), tokens[:3].tolist()) == ([1, 1, 1], [5, 7, 9])
    assert values[:3].tolist() == pytest.approx([FORBIDDEN] * 3)
    assert len(set(zip(rows[3:].tolist(), tokens[3:].tolist()))) == 13
    assert not values[3:].any()
    assert SamplingBatch.build([SamplingRow(params, 0, 2, None, (5, 9))], V).route == SamplingRoute(1, V)


def test_min_tokens_leaves_an_ignored_eos_alone() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True, stop_token_ids=[7])
    batch = SamplingBatch.build([SamplingRow(params, 0, 0, None, (9,))], V)
    assert batch.floats.reshape(3, 16)[2, :2].tolist() == [7, 0]


@pytest.mark.parametrize(
    ("kwargs", "route"),
    [
        ({}, SamplingRoute(1, V, has_random=True)),
        ({"top_k": 3}, SamplingRoute(1, V, has_random=True, topk_width=16)),
        ({"top_k": 70}, SamplingRoute(1, V, has_random=True, topk_width=V)),
        ({"top_k": V}, SamplingRoute(1, V, has_random=True)),
        ({"top_k": 3, "top_p": 0.9}, SamplingRoute(1, V, has_random=True, has_sort=True)),
        ({"min_p": 0.1}, SamplingRoute(1, V, has_random=True, has_min_p=True)),
        ({"logit_bias": {1: 2.0}}, SamplingRoute(1, V, has_random=True, num_edits=16)),
        ({"temperature": 0, "logprobs": 0}, SamplingRoute(1, V, num_logprobs=0)),
        ({"temperature": 0, "logprobs": 5}, SamplingRoute(1, V, num_logprobs=8)),
        ({"temperature": 0, "top_p": 0.5, "min_p": 0.5}, SamplingRoute(1, V)),
    ],
)
def test_the_route_has_only_the_work_that_someone_asked_for(
    kwargs: dict[str, Any], route: SamplingRoute
) -> None:
    assert SamplingBatch.build([SamplingRow(SamplingParams(**kwargs))], V).route == route


def test_a_large_k_is_answered_by_the_sort() -> None:
    route = SamplingBatch.build([SamplingRow(SamplingParams(top_k=2000))], 5000).route
    assert route.has_sort
    assert route.topk_width == 0


@given(
    st.lists(
        st.one_of(
            st.none(),
            st.builds(
                dict,
                temperature=st.sampled_from([0.0, 1.0]),
                top_k=st.integers(-1, 60),
                top_p=st.sampled_from([0.5, 1.0]),
                presence_penalty=st.sampled_from([0.0, 1.0]),
                logit_bias=st.dictionaries(st.integers(0, V - 1), st.floats(-9, 9), max_size=40),
            ),
        ),
        min_size=1,
        max_size=6,
    ),
    st.lists(st.integers(0, V - 1), max_size=50),
)
def test_array_sizes_follow_from_the_route(
    all_kwargs: list[dict[str, Any] | None], output: list[int]
) -> None:
    rows = []
    for kwargs in all_kwargs:
        params = None if kwargs is None else SamplingParams(**kwargs)
        history = None if params is None else PenaltyState.from_token_ids(params, [], output)
        rows.append(None if params is None else SamplingRow(params, 0, len(output), history))
    batch = SamplingBatch.build(rows, V)
    route = batch.route
    assert batch.floats.size == route.num_floats
    assert batch.floats.dtype == np.float32
    lists = batch.floats[route.num_row_floats :]
    for columns in np.split(lists, [3 * route.num_edits]):
        _, row, token = columns.reshape(3, -1)
        assert ((row >= 0) & (row < len(rows)) & (token >= 0) & (token < V)).all()


def test_a_token_id_outside_the_vocabulary_cannot_reach_the_next_row() -> None:
    row = SamplingRow(SamplingParams(temperature=0, logit_bias={V: 1.0}))
    with pytest.raises(ValueError, match=r"row 0: expected token ids in \[0, 100\), got \[100, 100\]"):
        SamplingBatch.build([row, GREEDY], V)


def test_penalties_without_history_are_refused() -> None:
    with pytest.raises(ValueError, match="row 1: expected a PenaltyState"):
        SamplingBatch.build([GREEDY, SamplingRow(SamplingParams(presence_penalty=1.0))], V)


def test_more_logits_than_int32_can_index_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected fewer than 2\*\*31 logits"):
        SamplingBatch.build([None] * 2048, 2**20)


def test_tokens_that_float32_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at most 16777216 rows and tokens, got 1 rows of 16777217"):
        SamplingBatch.build([None], 2**24 + 1)


def test_the_last_token_of_the_largest_vocabulary_keeps_its_number() -> None:
    params = SamplingParams(temperature=0, logit_bias={2**24 - 1: 1.0, 2**24 - 2: 2.0})
    batch = SamplingBatch.build([GREEDY, SamplingRow(params)], 2**24)
    assert batch.floats.reshape(3, 16)[2, :2].tolist() == [2**24 - 1, 2**24 - 2]

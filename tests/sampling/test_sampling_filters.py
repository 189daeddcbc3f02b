"""The kept sets against their definitions and against transformers' logits processors."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hpu_duo.sampling import PenaltyState, SamplingBatch, SamplingParams, SamplingRow
from hpu_duo.sampling.batch import RowTensors
from hpu_duo.sampling.rows import FORBIDDEN
from hpu_duo.sampling.sampler import filter_scores, penalize
from tests.sampling.reference import kept_tokens

torch.set_num_threads(1)
V = 300


def _rows(batch: SamplingBatch) -> RowTensors:
    block = torch.tensor(batch.floats[: batch.route.num_row_floats])
    return RowTensors(*block.view(-1, batch.route.num_rows))


def _filter(logits: torch.Tensor, all_params: list[SamplingParams]) -> torch.Tensor:
    """Mask of the tokens that are kept, bool [N, V]."""
    batch = SamplingBatch.build([SamplingRow(params) for params in all_params], logits.shape[1])
    rows = _rows(batch)
    return filter_scores(logits / rows.temperature[:, None], rows, batch.route) > FORBIDDEN


def _random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.8])
@pytest.mark.parametrize("top_k", [0, 2, 40, 299])
@pytest.mark.parametrize("top_p", [0.1, 0.62, 0.95, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.03, 0.5])
def test_the_kept_set_is_that_of_the_transformers_warpers(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = _random_logits(20)
    no_ids: Any = torch.empty(20, 0, dtype=torch.long)
    expected: Any = TemperatureLogitsWarper(temperature)(no_ids, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(no_ids, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(no_ids, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(no_ids, expected)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert torch.equal(_filter(logits, [params] * 20), expected > float("-inf"))


@settings(deadline=None)
@given(
    st.lists(st.integers(-20, 20), min_size=V, max_size=V),
    st.integers(2, V),
    st.booleans(),
)
def test_top_k_keeps_every_token_that_ties_with_the_last_one(
    logits: list[int], top_k: int, with_sort: bool
) -> None:
    """By the selection and, when a batch mate needs it, by the sort."""
    params = SamplingParams(top_k=top_k)
    mates = [SamplingParams(top_p=0.5)] if with_sort else []
    kept = _filter(torch.tensor([logits] * (1 + len(mates))).float(), [params, *mates])[0]
    assert set(kept.nonzero().flatten().tolist()) == kept_tokens(logits, params)
    assert int(kept.sum()) >= top_k


@given(st.integers(0, 2**31), st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.999]))
@settings(deadline=None)
def test_top_p_keeps_the_smallest_prefix_that_reaches_p(seed: int, top_p: float) -> None:
    logits = _random_logits(1, seed)
    kept = _filter(logits, [SamplingParams(top_p=top_p)])[0].numpy()
    probs = torch.softmax(logits[0].double(), -1).numpy()
    assert probs[kept].sum() >= top_p - 1e-6
    assert probs[kept].sum() - probs[kept].min() < top_p + 1e-6
    assert probs[kept].min() >= probs[~kept].max(initial=0.0)


def test_top_p_keeps_the_token_that_crosses_p_and_all_that_tie_with_it() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))
    assert _filter(logits, [SamplingParams(top_p=0.6)]).tolist() == [[True, True, False, False]]
    assert _filter(logits, [SamplingParams(top_p=0.5)]).tolist() == [[True, False, False, False]]
    assert _filter(logits, [SamplingParams(top_p=0.8)]).tolist() == [[True, True, True, True]]


@given(st.integers(0, 2**31), st.floats(0.01, 1.0))
@settings(deadline=None)
def test_min_p_is_relative_to_the_likeliest_token(seed: int, min_p: float) -> None:
    logits = _random_logits(1, seed)
    kept = _filter(logits, [SamplingParams(min_p=min_p)])[0].numpy()
    ratio = np.exp((logits[0] - logits[0].max()).double().numpy())
    assert kept[ratio > min_p * (1 + 1e-5)].all()
    assert not kept[ratio < min_p * (1 - 1e-5)].any()
    assert kept[int(logits.argmax())]


@pytest.mark.parametrize("penalty", [0.8, 1.0001, 1.7])
def test_repetition_penalty_is_bit_for_bit_that_of_transformers(penalty: float) -> None:
    logits = _random_logits(3)
    tokens = torch.randint(0, V, (3, 50), generator=torch.Generator().manual_seed(1))
    params = SamplingParams(repetition_penalty=penalty)
    rows = [
        SamplingRow(params, 0, 20, PenaltyState.from_token_ids(params, ids[:30], ids[30:]))
        for ids in tokens.tolist()
    ]
    batch = SamplingBatch.build(rows, V)
    codes = torch.zeros(3 * V)
    for code, row, token in batch.floats[batch.route.num_row_floats :].reshape(3, -1).T:
        codes[int(row) * V + int(token)] += code
    got = penalize(logits, codes.view(3, V), _rows(batch))
    assert torch.equal(got, RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits))

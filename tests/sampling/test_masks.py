"""Packed masks: exactly the tokens that are allowed, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.sampling import PenaltyState, RowError, SamplingBatch, SamplingParams, SamplingRow, sample
from hpu_duo.sampling.rows import FORBIDDEN, blank_masks, forbid, forbidden_bits, num_words

torch.set_num_threads(1)
EOS = 5


class Only:
    """A grammar at a place where just these tokens may follow."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens = list(tokens)

    def write_allowed(self, words: npt.NDArray[np.int32]) -> None:
        words[:] = packed([self.tokens], 32 * len(words))[0]


def packed(rows: Sequence[Iterable[int]], vocab_size: int) -> npt.NDArray[np.int32]:
    """Bit by bit, in Python's integers."""
    words = np.zeros((len(rows), num_words(vocab_size)), np.uint32)
    for row, tokens in enumerate(rows):
        for token in tokens:
            words[row, token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


@given(data=st.data(), vocab_size=st.integers(1, 130), num_rows=st.integers(1, 4))
@settings(max_examples=60)
def test_forbidden_tokens_alone_change(data: st.DataObject, vocab_size: int, num_rows: int) -> None:
    rows = [data.draw(st.sets(st.integers(0, vocab_size - 1))) for _ in range(num_rows)]
    masks = torch.from_numpy(packed(rows, vocab_size))
    scores = torch.randn(num_rows, vocab_size) * 100
    expected = scores.clone()
    for row, tokens in enumerate(rows):
        for token in set(range(vocab_size)) - tokens:
            expected[row, token] = FORBIDDEN
    assert torch.equal(forbid(scores, masks, FORBIDDEN), expected)
    # The form that other devices than a CPU run.
    assert torch.equal(torch.where(forbidden_bits(masks, vocab_size) > 0, FORBIDDEN, scores), expected)


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 1.3, "logprobs": 2},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 1e-5, "repetition_penalty": 1000.0},
    {"temperature": 1.0, "top_p": 0.6, "min_p": 0.05, "presence_penalty": 1.0},
    {"temperature": 0, "logit_bias": {3: -100, 9: 50}},
]


def row(params: dict[str, Any], number: int, grammar: Only | None) -> SamplingRow:
    made = SamplingParams(seed=number, **params)
    outputs = [1, 2, 2, 40]
    history = PenaltyState.from_token_ids(made, [1, 7], outputs)
    return SamplingRow(made, number, len(outputs), history, (EOS,), None, grammar)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_mask_that_allows_all_changes_no_bit(params: dict[str, Any], is_static: bool) -> None:
    logits = torch.randn(8, 70, generator=torch.Generator().manual_seed(1)) * 3
    free = SamplingBatch.build([row(params, n, None) for n in range(8)], 70, is_static=is_static)
    masked = SamplingBatch.build([row(params, n, Only(range(70))) for n in range(8)], 70, is_static=is_static)
    assert masked.route.has_masks
    got, expected = sample(logits, masked), sample(logits, free)
    assert torch.equal(got.token_ids, expected.token_ids)
    if expected.logprobs is not None:
        assert got.logprobs is not None
        assert all(map(torch.equal, got.logprobs, expected.logprobs))


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_a_masked_row_samples_as_if_it_had_no_other_tokens(
    params: dict[str, Any], seed: int, is_static: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 70, generator=generator) * 3
    allowed = [torch.randperm(70, generator=generator)[: 1 + 11 * n].tolist() for n in range(6)]
    rows = [row(params, n, Only(tokens)) for n, tokens in enumerate(allowed)]
    got = sample(logits, SamplingBatch.build(rows, 70, is_static=is_static))
    without = torch.full_like(logits, FORBIDDEN)
    for n, tokens in enumerate(allowed):
        without[n, tokens] = logits[n, tokens]
    free = SamplingBatch.build([row(params, n, None) for n in range(6)], 70, is_static=is_static)
    assert torch.equal(got.token_ids, sample(without, free).token_ids)
    assert all(int(token) in tokens for token, tokens in zip(got.token_ids, allowed))
    if got.logprobs is not None:
        # What is reported are the model's own probabilities.
        model = torch.log_softmax(logits, -1)
        for n, token in enumerate(got.token_ids.tolist()):
            torch.testing.assert_close(got.logprobs.sampled[n], model[n, token])


def test_rows_without_a_grammar_are_as_they_were() -> None:
    logits = torch.randn(3, 70)
    rows = [row(PARAMS[0], 0, Only([8])), row(PARAMS[2], 1, None), None]
    alone = SamplingBatch.build([None, row(PARAMS[2], 1, None), None], 70)
    got = sample(logits, SamplingBatch.build(rows, 70))
    assert int(got.token_ids[0]) == 8
    assert got.token_ids[1] == sample(logits, alone).token_ids[1]


def masks_of(params: SamplingParams, num_outputs: int, tokens: Sequence[int]) -> list[int]:
    """Tokens that are left of what a grammar allows."""
    made = SamplingRow(params, 0, num_outputs, None, (EOS,), None, Only(tokens))  # type: ignore[arg-type]
    masks = SamplingBatch.build([made], 70).masks
    assert masks is not None
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


@pytest.mark.parametrize(
    ("changes", "num_outputs", "allowed", "left"),
    [
        ({"min_tokens": 3}, 2, [EOS, 31, 32, 69], [31, 32, 69]),
        ({"min_tokens": 3}, 3, [EOS, 31], [EOS, 31]),
        ({"min_tokens": 3}, 2, [EOS], [EOS]),
        ({"min_tokens": 3, "stop_token_ids": [63]}, 2, [EOS, 63, 64], [64]),
        ({"stop_token_ids": [63]}, 2, [63, 64], [63, 64]),
        ({"ignore_eos": True}, 9, [EOS, 31], [31]),
        ({"ignore_eos": True}, 9, [EOS], [EOS]),
    ],
)
def test_an_output_is_not_ended_early_unless_nothing_else_may_follow(
    changes: dict[str, Any], num_outputs: int, allowed: list[int], left: list[int]
) -> None:
    assert masks_of(SamplingParams(temperature=0, **changes), num_outputs, allowed) == left


def test_a_grammar_that_allows_nothing_is_an_error_of_its_row() -> None:
    rows = [row(PARAMS[0], 0, None), row(PARAMS[0], 1, Only([]))]
    with pytest.raises(RowError, match="no token of the vocabulary can continue the output") as error:
        SamplingBatch.build(rows, 70)
    assert error.value.row == 1


def test_padding_allows_everything() -> None:
    assert blank_masks(2, 33).tolist() == [[-1, -1], [-1, -1]]

from __future__ import annotations

import numpy as np
import pytest

from hpu_duo.request import FinishReason
from tests.engine_host.simulated_device import EOS, VOCAB_SIZE, make_request


def test_eos_ends_a_request_and_stays_in_the_outputs() -> None:
    request = make_request()
    assert request.append(5) is None
    assert request.append(EOS) is FinishReason.STOP
    assert request.output_token_ids.tolist() == [5, EOS]


def test_ignored_eos_does_not_end_a_request_but_a_stop_token_does() -> None:
    request = make_request(ignore_eos=True, stop_token_ids=(7,))
    assert request.append(EOS) is None
    assert request.append(7) is FinishReason.STOP


def test_an_eos_token_named_as_stop_token_ends_a_request_that_ignores_eos() -> None:
    assert make_request(ignore_eos=True, stop_token_ids=(EOS,)).append(EOS) is FinishReason.STOP


def test_nothing_stops_a_request_before_min_tokens() -> None:
    request = make_request(min_tokens=3, stop_token_ids=(7,))
    assert [request.append(token) for token in (EOS, 7, 7)] == [None, None, FinishReason.STOP]


def test_max_tokens_ends_a_request_by_length() -> None:
    request = make_request(max_tokens=2)
    assert [request.append(5), request.append(5)] == [None, FinishReason.LENGTH]


def test_a_stop_token_in_the_last_place_counts_as_stop() -> None:
    assert make_request(max_tokens=1).append(EOS) is FinishReason.STOP


@pytest.mark.parametrize("max_tokens", [None, 100])
def test_max_model_len_ends_a_request_by_length(max_tokens: int | None) -> None:
    request = make_request(prompt=(1, 2, 3), max_tokens=max_tokens, max_model_len=5)
    assert [request.append(5), request.append(5)] == [None, FinishReason.LENGTH]
    with pytest.raises(ValueError, match="all of its 5 tokens"):
        request.append(5)


def test_the_last_token_of_a_request_never_needs_a_place_in_the_cache() -> None:
    assert make_request(prompt=(1, 2, 3), max_tokens=4).max_cached_tokens == 6


def test_a_sibling_has_the_prompt_of_its_parent_and_no_output_of_it() -> None:
    parent = make_request("p", (4, 5, 6), seed=1)
    parent.append(9)
    child = parent.sibling("c", sample_index=2, sampling_seed=8)
    assert child.tokens[: child.num_tokens].tolist() == [4, 5, 6]
    assert (child.parent, child.sample_index, child.sampling_seed) == (parent, 2, 8)
    child.append(7)
    assert parent.output_token_ids.tolist() == [9]


def test_a_sibling_has_no_siblings_of_its_own() -> None:
    child = make_request().sibling("c", sample_index=1, sampling_seed=0)
    with pytest.raises(ValueError, match="expected sample 0"):
        child.sibling("d", sample_index=2, sampling_seed=0)
    with pytest.raises(ValueError, match="1 or more, got 0"):
        make_request().sibling("c", sample_index=0, sampling_seed=0)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "at least one prompt token"),
        ([[1, 2]], r"got shape \(1, 2\)"),
        ([1.5], "integer prompt tokens, got float64"),
        ([1, -1], "from -1 to 1, expected 0 to 12"),
        ([VOCAB_SIZE], "expected 0 to 12"),
        ([1] * 64, "64 prompt tokens, at most 63"),
    ],
)
def test_a_prompt_the_model_cannot_take_is_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_request(prompt=prompt)


def test_a_numpy_prompt_is_copied() -> None:
    prompt = np.array([1, 2, 3], dtype=np.int32)
    request = make_request(prompt=prompt)  # type: ignore[arg-type]
    prompt[0] = 9
    assert request.prompt_token_ids.tolist() == [1, 2, 3]

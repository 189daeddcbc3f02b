import pickle
from typing import Any

import pytest

from hpu_duo.sampling import SamplingParams


def test_defaults_are_plain_sampling_of_sixteen_tokens() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p, params.max_tokens) == (
        1,
        1.0,
        0,
        1.0,
        16,
    )
    assert not params.is_greedy
    assert not params.needs_penalties


@pytest.mark.parametrize(
    "kwargs",
    [
        {"n": 0},
        {"stop": 5},
        {"stop_token_ids": 5},
        {"forced_token_ids": 5},
        {"n": True},
        {"n": 1.5},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"top_k": -2},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"logit_bias": {3: 101.0}},
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": {"three": 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1.5: 1.0}},
        {"logit_bias": {"7": 1.0, 7: 2.0}},
        {"seed": 1.5},
        {"logprobs": -1},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": 17},
        {"stop": [""]},
        {"stop": ["ok", 3]},
        {"stop_token_ids": [-5]},
    ],
)
def test_a_value_outside_its_range_is_refused_with_expected_and_got(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected .*(got|twice)"):
        SamplingParams(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"logit_bias": {50: 1.0}}, r"logit_bias: expected token ids in \[0, 50\), got 50"),
        ({"stop_token_ids": (99,)}, r"stop_token_ids: expected token ids in \[0, 50\), got 99"),
        ({"logprobs": 51}, "logprobs: expected at most vocab_size=50, got 51"),
    ],
)
def test_validate_refuses_what_the_vocabulary_does_not_have(kwargs: dict[str, Any], message: str) -> None:
    params = SamplingParams(**kwargs)
    params.validate(100)
    with pytest.raises(ValueError, match=message):
        params.validate(50)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 9e-6}, True),
        ({"temperature": 1e-5}, False),
        ({"top_k": 1}, True),
        ({"top_k": -1}, False),
        ({"top_p": 0.01}, False),
    ],
)
def test_greedy_means_zero_temperature_or_one_candidate(kwargs: dict[str, Any], expected: bool) -> None:
    assert SamplingParams(**kwargs).is_greedy is expected


def test_one_stop_string_becomes_a_tuple_of_one() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_json_keys_of_logit_bias_become_integers() -> None:
    from_json: dict[Any, float] = {"12": -100}
    assert SamplingParams(logit_bias=from_json).logit_bias == {12: -100}


def test_seed_minus_one_is_no_seed() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-2).seed == -2


def test_a_caller_cannot_change_the_bias_afterwards() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 50.0
    assert params.logit_bias == {1: 2.0}


def test_params_survive_pickling_and_hash_equal() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, stop=["x"], top_k=5)
    _ = params.bias_arrays, params.is_plain_greedy
    copy = pickle.loads(pickle.dumps(params))
    assert copy == params
    assert hash(copy) == hash(params)


def test_a_logit_bias_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ValueError, match="logit_bias: expected a mapping of token ids, got list"):
        SamplingParams(logit_bias=[1])  # type: ignore[arg-type]

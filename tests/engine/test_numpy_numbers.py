"""Numbers of numpy and torch are taken for the Python numbers that they are equal to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import Tiny, assert_holds_nothing, serve, tokens_of
from tests.modeling.families import prompts_of
from tests.tiers import crossed

PROMPTS = prompts_of([9, 4])
INTEGERS: dict[str, Any] = {
    "n": 2,
    "top_k": 5,
    "seed": -3,
    "logprobs": 3,
    "max_tokens": 6,
    "min_tokens": 2,
    "stop_token_ids": [5, 6],
    "forced_token_ids": [7],
    "decoded_prompt_tokens": 2,
}


@pytest.mark.parametrize(("name", "dtype"), crossed(list(INTEGERS), {"int64": np.int64, "int32": np.int32}))
def test_parameters_of_numpy_sample_as_those_of_python(tiny: Tiny, name: str, dtype: type) -> None:
    value = INTEGERS[name]
    as_numpy = np.array(value, dtype) if isinstance(value, list) else dtype(value)
    served = tiny.load(enable_prefix_caching=False)  # the same sums twice
    plain, numpy = (
        serve(served, PROMPTS, SamplingParams(**{"seed": 4, "max_tokens": 4, "ignore_eos": True, name: one}))
        for one in (value, as_numpy)
    )
    assert tokens_of(numpy) == tokens_of(plain)
    assert [sample.logprobs for each in numpy for sample in each] == [
        sample.logprobs for each in plain for sample in each
    ]


def test_parameters_are_equal_however_their_numbers_are_given() -> None:
    numpy = {name: np.array(value)[()] for name, value in INTEGERS.items()}
    params = SamplingParams(**numpy)
    assert params == SamplingParams(**INTEGERS)
    for name in INTEGERS:
        value = getattr(params, name)
        assert all(type(one) is int for one in (value if isinstance(value, tuple) else (value,)))


@pytest.mark.parametrize("number", [np.int64, np.int32, torch.tensor])
@pytest.mark.parametrize("name", ["max_new_tokens", "min_new_tokens", "num_return_sequences", "max_length"])
def test_generate_takes_numbers_of_numpy_and_torch(tiny: Tiny, name: str, number: Any) -> None:
    served = tiny.load()
    value = {"max_length": 14}.get(name, 2)
    options: dict[str, Any] = {"do_sample": True, "seed": 3}
    if name not in ("max_new_tokens", "max_length"):
        options["max_new_tokens"] = 4
    expected = served.generate([PROMPTS[0]], **options, **{name: value})
    assert served.generate([PROMPTS[0]], **options, **{name: number(value)}).tolist() == expected.tolist()
    assert_holds_nothing(served)

"""Score a given text as a request: its tokens are forced, and their log-probabilities are the result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpu_duo.engine.outputs import Completion, ContinuationScore
from hpu_duo.request import token_array
from hpu_duo.sampling import SamplingParams


def forced(tokens: Sequence[int] | np.ndarray) -> SamplingParams:
    """Return parameters that decode exactly these tokens, and report the log-probabilities of them.

    Raises:
        ValueError: not a list of one or more integers.
    """
    token_ids = token_array("continuation", tokens)
    if token_ids.ndim != 1 or token_ids.size == 0 or token_ids.dtype.kind not in "iu":
        raise ValueError(
            f"expected a continuation of one or more token ids, got {token_ids.dtype} {token_ids.shape}"
        )
    return SamplingParams(
        temperature=0.0,
        logprobs=1,
        max_tokens=len(token_ids),
        ignore_eos=True,
        forced_token_ids=tuple(token_ids.tolist()),
        decoded_prompt_tokens=1,
    )


def score_of(sample: Completion) -> ContinuationScore:
    """Return the score of a decoded continuation, from its log-probabilities."""
    return ContinuationScore(
        tuple(one.logprob for one in sample.logprobs),
        tuple(one.token_id in one.top for one in sample.logprobs),
    )

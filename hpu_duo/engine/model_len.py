"""Outputs that the longest sequence of the model cut, told once for each call."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from hpu_duo.engine.outputs import Completion
from hpu_duo.request import FinishReason
from hpu_duo.sampling import SamplingParams

_log = logging.getLogger(__name__)


def warn_of_cuts(
    done: Iterable[Sequence[Completion]], params: Iterable[SamplingParams | None], max_model_len: int
) -> None:
    """Warn if outputs ended at ``max_model_len`` before a stop and before their ``max_tokens``.

    Their finish reason is ``length``, as vLLM's. Without ``max_tokens`` this is the end that was asked for.

    Args:
        done: the samples of each prompt.
        params: of each prompt.
    """
    outputs = [list(samples) for samples in done]
    lacking = [
        one.max_tokens - len(sample.token_ids)
        for samples, one in zip(outputs, params)
        for sample in samples
        if one is not None and one.max_tokens is not None and sample.finish_reason is FinishReason.LENGTH
    ]
    cut = [num_tokens for num_tokens in lacking if num_tokens > 0]
    if cut:
        _log.warning(
            "%d of %d outputs ended at max_model_len=%d, up to %d tokens before the limit that was asked for "
            "(finish_reason 'length'): load the model with a higher max_model_len, or ask for fewer tokens",
            len(cut),
            sum(map(len, outputs)),
            max_model_len,
            max(cut),
        )

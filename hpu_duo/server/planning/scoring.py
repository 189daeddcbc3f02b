"""Log-probabilities of the tokens of prompts."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from hpu_duo.engine.outputs import TokenLogprob
from hpu_duo.sampling import SamplingParams
from hpu_duo.server.answers import Choice
from hpu_duo.server.running import AsyncEngine, Submission


async def score_prompts(
    engine: AsyncEngine, prompts: Sequence[Sequence[int]], num_top: int
) -> list[Sequence[TokenLogprob | int]]:
    """Score each token of each prompt, given those before it.

    They are decoded, several in a step if the engine has ``decode_len``, so every probability is one that
    generation would have, from the same cache; see ``Engine.score``.

    Args:
        num_top: so many of the likeliest tokens are named beside each.

    Returns:
        For each prompt one entry per token: its first token alone, which nothing precedes, then
        log-probabilities.

    Raises:
        RequestFailedError: the engine failed.
    """
    name = uuid.uuid4().hex
    submissions = [
        Submission(f"{name}-{index}", prompt[:1], _forcing(prompt[1:], num_top), index)
        for index, prompt in enumerate(prompts)
        if len(prompt) > 1
    ]
    scored = [Choice() for _ in prompts]
    stream = engine.open(submissions)
    try:
        while (batch := await stream.read()) is not None:
            for choice, output in batch:
                scored[choice].add(output)
    finally:
        stream.close()
    return [[int(prompt[0]), *choice.logprobs] for prompt, choice in zip(prompts, scored)]


def _forcing(tokens: Sequence[int], num_top: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        logprobs=num_top,
        max_tokens=len(tokens),
        ignore_eos=True,
        forced_token_ids=tuple(tokens),
        decoded_prompt_tokens=1,
    )

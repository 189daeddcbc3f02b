"""Log-probabilities of the tokens of prompts."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from hpu_duo.sampling import SamplingParams
from hpu_duo.server.answers import Choice, CompletionAnswer
from hpu_duo.server.running import OutputStream, Submission


@dataclass(frozen=True)
class Scoring:
    """Each token of each prompt is scored, given those before it.

    They are decoded, several in a step if the engine has ``decode_len``, so every probability is one that
    generation would have, from the same cache; see ``Engine.score``.

    Attributes:
        prompts: token ids of each.
        num_top: so many of the likeliest tokens are named beside each.
        answer: echoes the prompts.
        cache_salt: see ``SamplingParams``.
    """

    prompts: Sequence[Sequence[int]]
    num_top: int
    answer: CompletionAnswer
    cache_salt: str | None = None

    @property
    def submissions(self) -> list[Submission]:
        """Requests to submit, one for each prompt of more than a token; their samples are the prompts."""
        name = uuid.uuid4().hex
        return [
            Submission(f"{name}-{index}", prompt[:1], self._forcing(prompt[1:]), index)
            for index, prompt in enumerate(self.prompts)
            if len(prompt) > 1
        ]

    async def read(self, stream: OutputStream) -> None:
        """Read the outputs of the submissions to their end, and tell the answer.

        Raises:
            RequestFailedError: the engine failed.
        """
        scored = [Choice() for _ in self.prompts]
        while (batch := await stream.read()) is not None:
            for choice, output in batch:
                scored[choice].add(output)
        # Nothing comes before the first token of a prompt, so that it stands alone.
        self.answer.score([[int(one[0]), *choice.logprobs] for one, choice in zip(self.prompts, scored)])

    def _forcing(self, tokens: Sequence[int]) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            logprobs=self.num_top,
            max_tokens=len(tokens),
            ignore_eos=True,
            forced_token_ids=tuple(tokens),
            decoded_prompt_tokens=1,
            cache_salt=self.cache_salt,
        )

"""What the engine hands out while requests run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hpu_duo.request import FinishReason


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities at one output position, under the model's own distribution.

    Attributes:
        token_id, logprob, rank: of the sampled token; rank 1 is the likeliest.
        top: token id to log-probability of the likeliest tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(frozen=True)
class RequestOutput:
    """What a step added to one request.

    Attributes:
        request_id: as given to ``add_request``; samples of one prompt share it.
        sample_index: which of the ``n`` samples.
        token_ids: new tokens; at most one a step.
        text: text that they settle, empty without a tokenizer.
        logprobs: one entry per token when asked for.
        finish_reason: set in the last output of a sample.
        stop_reason: the stop string or stop token that ended it.
    """

    request_id: str
    sample_index: int
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def is_finished(self) -> bool:
        """Whether this is the sample's last output."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class ContinuationScore:
    """How likely a model finds one given continuation of a prompt.

    Attributes:
        logprobs: natural logarithm of the probability of each token, given the prompt and the tokens before.
        is_likeliest: for each token, whether greedy decoding would have chosen it there.
    """

    logprobs: tuple[float, ...]
    is_likeliest: tuple[bool, ...]

    @property
    def logprob(self) -> float:
        """Of the whole continuation."""
        return math.fsum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding of the prompt would give the continuation."""
        return all(self.is_likeliest)


@dataclass
class Completion:
    """One finished sample, as ``Engine.generate`` returns it."""

    request_id: str
    sample_index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, output: RequestOutput) -> None:
        """Append what a step added."""
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason

"""One choice of an answer, as its tokens come."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpu_duo.engine.outputs import RequestOutput, TokenLogprob
from hpu_duo.request import FinishReason


@dataclass
class Choice:
    """The sum of outputs.

    Attributes:
        text: settled so far.
        token_ids, logprobs: of the tokens sampled so far.
        finish_reason, stop_reason: why it ended; None while it has not.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> Choice:
        """A choice of one output."""
        tokens, logprobs = list(output.token_ids), list(output.logprobs)
        return cls(output.text, tokens, logprobs, output.finish_reason, output.stop_reason)

    def add(self, output: RequestOutput) -> None:
        """Append what a step added."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell: a token may settle no text."""
        return not (self.text or self.logprobs or self.finish_reason is not None)

"""Memory that the outputs of one call take until they are sent."""

from __future__ import annotations

from collections.abc import Iterable

from hpu_duo.engine.outputs import RequestOutput
from hpu_duo.server.running.failures import AnswerTooLargeError

_OUTPUT_BYTES, _TOKEN_BYTES, _CHARACTER_BYTES, _LOGPROB_BYTES = 512, 64, 4, 512
"""Most bytes of an unread output, of a kept token, of a character of text, and of a log-probability with its
name and bytes in the body; CPython 3.12 takes three quarters of the first and the last."""


class Holding:
    """Bytes of a call's outputs, estimated: those that lie unread, and those that are kept for a body.

    Args:
        max_bytes: most of them.

    Attributes:
        num_bytes: held now.
        keeps: whether outputs that were read are kept until the call ends, as for an answer that is sent
            whole.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.keeps = False
        self.num_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether more is held than may be."""
        return self.num_bytes > self._max_bytes

    def echo(self, num_characters: int, times: int) -> None:
        """Hold prompts that stand before their answers, and what is held so far, once for each answer.

        Args:
            num_characters: of all choices together.
            times: choices of each prompt.

        Raises:
            AnswerTooLargeError: that is too much.
        """
        self.num_bytes = self.num_bytes * times + _CHARACTER_BYTES * num_characters
        if self.is_full:
            raise self.refusal()

    def came(self, output: RequestOutput) -> None:
        """Hold an output."""
        self.num_bytes += _OUTPUT_BYTES + _kept_bytes(output)

    def left(self, outputs: Iterable[RequestOutput]) -> None:
        """Give up what outputs took that were read, but for what is kept of them."""
        for output in outputs:
            self.num_bytes -= _OUTPUT_BYTES + (0 if self.keeps else _kept_bytes(output))

    def refusal(self) -> AnswerTooLargeError:
        """The error of a call that holds too much."""
        return AnswerTooLargeError(
            f"expected an answer of at most {self._max_bytes:,} bytes in memory (--max-answer-size): ask for "
            "fewer choices, tokens or logprobs, or for a stream"
        )


def _kept_bytes(output: RequestOutput) -> int:
    entries = sum(1 + len(one.top) for one in output.logprobs)
    text = _CHARACTER_BYTES * len(output.text)
    return _TOKEN_BYTES * len(output.token_ids) + text + _LOGPROB_BYTES * entries

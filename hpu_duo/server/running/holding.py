"""Memory that outputs take until they are sent: those of one call, and of all calls together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakSet

from hpu_duo.engine.outputs import RequestOutput
from hpu_duo.server.running.failures import AnswerMemoryFullError, AnswerTooLargeError

_OUTPUT_BYTES, _TOKEN_BYTES, _CHARACTER_BYTES, _LOGPROB_BYTES = 512, 64, 4, 512
"""Most bytes of an unread output, of a kept token, of a character of text, and of a log-probability with its
name and bytes in the body; CPython 3.12 takes three quarters of the first and the last."""


class AnswerMemory:
    """Memory that the outputs of all calls take together, until they are sent.

    Once they take more than they may, the call that takes most is ended.

    Args:
        max_bytes: most bytes.

    Attributes:
        max_bytes: see above.
        num_bytes: taken now.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._holdings: WeakSet[Holding] = WeakSet()

    def hold(self, max_bytes: int) -> Holding:
        """Begin to count the bytes of a call's outputs; its ``release`` ends that.

        Args:
            max_bytes: most of this call.
        """
        holding = Holding(max_bytes, self)
        self._holdings.add(holding)
        return holding

    def check(self) -> None:
        """Refuse a call that comes while all memory is taken.

        Raises:
            AnswerMemoryFullError: it is.
        """
        if self.num_bytes >= self.max_bytes:
            raise self._refusal()

    def changed(self, holding: Holding, num_bytes: int) -> None:
        """Count bytes that a call takes from now on, or no longer takes; for ``Holding``."""
        if not holding.is_released:
            self.num_bytes += num_bytes
            while self.num_bytes > self.max_bytes:
                self._end_largest()

    def forget(self, holding: Holding) -> None:
        """Count a call no more; for ``Holding``."""
        if not holding.is_released:
            holding.is_released = True
            self._holdings.discard(holding)
            self.num_bytes -= holding.num_bytes

    def _end_largest(self) -> None:
        largest = max(self._holdings, key=lambda each: each.num_bytes)
        self.forget(largest)
        largest.error = self._refusal()
        largest.on_ended(largest.error)

    def _refusal(self) -> AnswerMemoryFullError:
        return AnswerMemoryFullError(
            f"expected answers of all calls together of at most {self.max_bytes:,} bytes in memory "
            "(--answer-memory), which other answers take: try again, or ask for a stream, fewer choices, "
            "tokens or logprobs"
        )


class Holding:
    """Bytes of a call's outputs, estimated: those that are not sent yet, and those that are kept for a body.

    Args:
        max_bytes: most of them.
        memory: of all calls.

    Attributes:
        num_bytes: held now.
        keeps: whether outputs that were read are kept until the call ends, as for an answer that is sent
            whole.
        on_ended: called when the call is ended since all calls together take too much; set by whoever waits
            for outputs, or for the caller to take them.
        error: why that was; None if it was not.
        is_released: whether it counts no more.
    """

    def __init__(self, max_bytes: int, memory: AnswerMemory) -> None:
        self._max_bytes, self._memory = max_bytes, memory
        self.keeps = False
        self.num_bytes = 0
        self.on_ended: Callable[[Exception], object] = lambda _: None
        self.error: AnswerMemoryFullError | None = None
        self.is_released = False

    @property
    def is_full(self) -> bool:
        """Whether more bytes are counted than are allowed."""
        return self.num_bytes > self._max_bytes

    def echo(self, num_characters: int, times: int) -> None:
        """Count prompts that precede their answers, and what is stored so far, once for each answer.

        Args:
            num_characters: of all choices together.
            times: choices of each prompt.

        Raises:
            AnswerTooLargeError: that is too much.
            AnswerMemoryFullError: it is too much beside other calls.
        """
        before, wanted = self.num_bytes, self.num_bytes * times + _CHARACTER_BYTES * num_characters
        if wanted > self._max_bytes:
            raise self.refusal()
        self._change(wanted - before)
        if self.error is not None:
            raise self.error

    def came(self, output: RequestOutput) -> None:
        """Hold an output."""
        self._change(_OUTPUT_BYTES + _kept_bytes(output))

    def passing(self, outputs: Iterable[RequestOutput]) -> int:
        """Bytes of outputs that are not kept once they are sent."""
        return sum(_OUTPUT_BYTES + (0 if self.keeps else _kept_bytes(output)) for output in outputs)

    def sent(self, num_bytes: int) -> None:
        """Give bytes up."""
        self._change(-num_bytes)

    def release(self) -> None:
        """Give everything up, at the end of the call."""
        self._memory.forget(self)

    def refusal(self) -> AnswerTooLargeError:
        """The error of a call that holds too much."""
        return AnswerTooLargeError(
            f"expected an answer of at most {self._max_bytes:,} bytes in memory (--max-answer-size): ask for "
            "fewer choices, tokens or logprobs, or for a stream"
        )

    def _change(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._memory.changed(self, num_bytes)


def _kept_bytes(output: RequestOutput) -> int:
    entries = sum(1 + len(one.top) for one in output.logprobs)
    text = _CHARACTER_BYTES * len(output.text)
    return _TOKEN_BYTES * len(output.token_ids) + text + _LOGPROB_BYTES * entries

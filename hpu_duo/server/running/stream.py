"""The stream of a call's outputs to one reader, and accounting of its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple
from weakref import WeakSet

from hpu_duo.engine.outputs import RequestOutput
from hpu_duo.server.running.admission import (
    AnswerMemoryFullError,
    AnswerTooLargeError,
    RequestFailedError,
    SlowReaderError,
    Submission,
    Timing,
)

_OUTPUT_BYTES, _TOKEN_BYTES, _CHARACTER_BYTES, _LOGPROB_BYTES = 512, 64, 4, 512
"""Upper estimates of bytes of an unread output, of a stored token, of a character of text, and of a
log-probability with its name and bytes in the body; CPython 3.12 needs three quarters of the first and the
last."""

ENDED = "the answer was aborted: "
"""Prefix of the error of a call that has run, which should not be retried elsewhere."""


class AnswerMemory:
    """Memory accounting of the outputs of all calls, until they are sent.

    Beyond the limit, the call with the most bytes is aborted.

    Args:
        max_bytes: most bytes.

    Attributes:
        max_bytes: the limit.
        num_bytes: current bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._holdings: WeakSet[Holding] = WeakSet()

    def hold(self, max_bytes: int) -> Holding:
        """Create the account of a call's outputs, to be ended by its ``release``.

        Args:
            max_bytes: most of this call.
        """
        holding = Holding(max_bytes, self)
        self._holdings.add(holding)
        return holding

    def check(self) -> None:
        """Reject a call while seven eighths of the memory are used; the rest is for running ones.

        Raises:
            AnswerMemoryFullError: they are.
        """
        if self.num_bytes >= self.max_bytes - self.max_bytes // 8:
            raise self._refusal()

    def changed(self, holding: Holding, num_bytes: int) -> None:
        """Count bytes that a call allocates or, if negative, frees; for ``Holding``."""
        if not holding.is_released:
            self.num_bytes += num_bytes
            while self.num_bytes > self.max_bytes:
                self._end_largest()

    def forget(self, holding: Holding) -> None:
        """Remove the account of a call; for ``Holding``."""
        if not holding.is_released:
            holding.is_released = True
            self._holdings.discard(holding)
            self.num_bytes -= holding.num_bytes

    def _end_largest(self) -> None:
        largest = max(self._holdings, key=lambda each: each.num_bytes)
        self.forget(largest)
        largest.error = self._refusal(ENDED)
        largest.on_ended(largest.error)

    def _refusal(self, begin: str = "") -> AnswerMemoryFullError:
        return AnswerMemoryFullError(
            f"{begin}expected answers of all calls together of at most {self.max_bytes:,} bytes in memory "
            "(--answer-memory), which other answers use: try again, or request a stream, fewer choices, "
            "tokens or logprobs"
        )


class Holding:
    """Estimated bytes of a call's outputs: those not sent yet, and those stored for a body.

    Args:
        max_bytes: most of them.
        memory: of all calls.

    Attributes:
        num_bytes: current bytes.
        keeps: whether read outputs stay in memory until the call ends, as for an answer that is sent whole.
        on_ended: called if the call is aborted because all calls together exceed the limit; set by the task
            that waits for outputs, or for the caller to read.
        error: of that abort, else None.
        is_released: whether it is ended.
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
        """Whether the limit is exceeded."""
        return self.num_bytes > self._max_bytes

    def echo(self, num_characters: int, times: int) -> None:
        """Count echoed prompts, and what is stored so far, once for each answer.

        Args:
            num_characters: of all choices together.
            times: choices of each prompt.

        Raises:
            AnswerTooLargeError: the limit of a call is exceeded.
            AnswerMemoryFullError: that of all calls is.
        """
        before, wanted = self.num_bytes, self.num_bytes * times + _CHARACTER_BYTES * num_characters
        if wanted > self._max_bytes:
            raise self.refusal()
        self._change(wanted - before)
        if self.error is not None:
            raise self.error

    def came(self, output: RequestOutput) -> None:
        """Count an output."""
        self._change(_OUTPUT_BYTES + _kept_bytes(output))

    def passing(self, outputs: Iterable[RequestOutput]) -> int:
        """Bytes of outputs that are freed once they are sent."""
        return sum(_OUTPUT_BYTES + (0 if self.keeps else _kept_bytes(output)) for output in outputs)

    def sent(self, num_bytes: int) -> None:
        """Free bytes."""
        self._change(-num_bytes)

    def release(self) -> None:
        """Free all bytes, at the end of the call."""
        self._memory.forget(self)

    def refusal(self) -> AnswerTooLargeError:
        """The error of a call that exceeds the limit."""
        return AnswerTooLargeError(
            f"expected an answer of at most {self._max_bytes:,} bytes in memory (--max-answer-size): request "
            "fewer choices, tokens or logprobs, or a stream"
        )

    def _change(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._memory.changed(self, num_bytes)


def _kept_bytes(output: RequestOutput) -> int:
    entries = sum(1 + len(one.top) for one in output.logprobs)
    text = _CHARACTER_BYTES * len(output.text)
    return _TOKEN_BYTES * len(output.token_ids) + text + _LOGPROB_BYTES * entries


class ChoiceOutput(NamedTuple):
    """An output, and its choice of the answer."""

    choice: int
    output: RequestOutput


Take = Callable[[list[ChoiceOutput]], bool]
"""Processes a batch of outputs without waiting; returns whether it could."""


class OutputStream:
    """A bounded queue of the outputs of one or several requests, for one reader of the same event loop.

    The engine never waits for a slow reader: outputs are queued until they are read, at most ``max_behind``
    of them, or four for each sample if that is more. With one more the stream fails with a
    ``SlowReaderError``, as it does if they have too many bytes; if read outputs stay in memory, these fail it
    with an ``AnswerTooLargeError``, or an ``AnswerMemoryFullError`` if all calls together have too many. What
    was read counts until the next read: until then it is being sent.

    Args:
        submissions: the requests.
        max_behind: most unread outputs.
        holding: counts the bytes of outputs.
        abort: aborts requests in the engine, by id.
        timing: notified of tokens.

    Attributes:
        timing: of tokens.
        error: of a failed stream, else None.
        on_slow: called if the stream fails because of a slow reader, which may be waiting for something else,
            such as a socket.
    """

    def __init__(
        self,
        submissions: Sequence[Submission],
        max_behind: int,
        holding: Holding,
        abort: Callable[[Sequence[str]], None],
        timing: Timing,
    ) -> None:
        self.timing = timing
        self._first_choice = {one.request_id: one.first_choice for one in submissions}
        self._num_open = {one.request_id: one.params.n for one in submissions}
        self.on_slow: Callable[[], object] = lambda: None
        self._max_behind, self._abort = max(max_behind, 4 * self.num_open), abort
        self._holding = holding
        holding.on_ended = self._end_for_others
        self._pending: list[ChoiceOutput] = []
        # Bytes read and being sent.
        self._num_sending = 0
        self.error: Exception | None = None
        self._is_closed = False
        self._reader: asyncio.Future[None] | None = None
        self._take: Take | None = None

    @property
    def num_open(self) -> int:
        """Number of samples that have not ended."""
        return sum(self._num_open.values())

    @property
    def is_closed(self) -> bool:
        """Whether the reader has closed it, or was garbage-collected."""
        return self._is_closed

    def push(self, output: RequestOutput, at: float) -> bool:
        """Queue an output; ``wake`` wakes the reader. Returns whether its request has ended.

        Args:
            at: end of its step, by ``time.perf_counter``.
        """
        request_id = output.request_id
        choice = self._first_choice[request_id] + output.sample_index
        if output.token_ids:
            self.timing.came(choice, at, output.admitted_at)
        if output.finish_reason is not None:
            self._num_open[request_id] -= 1
        has_ended = not self._num_open[request_id]
        if has_ended:
            del self._num_open[request_id]
        if output.error is not None:
            self.fail(_failure(output.error))
        elif not self._is_closed and self.error is None:
            self._keep(ChoiceOutput(choice, output))
        return has_ended

    def _keep(self, one: ChoiceOutput) -> None:
        self._pending.append(one)
        self._holding.came(one.output)
        if self._holding.is_full and (self._holding.keeps or self._is_awaited):
            self.fail(self._holding.refusal())
        elif self._holding.is_full or len(self._pending) > self._max_behind:
            num_bytes = self._holding.num_bytes
            self._fail_as_slow(
                SlowReaderError(
                    f"a stream was read too slowly: {len(self._pending):,} outputs are not sent, and the "
                    f"answer has {num_bytes:,} bytes in memory"
                )
            )

    @property
    def _is_awaited(self) -> bool:
        """Whether the reader waits for outputs, and all previous ones are sent."""
        return self._reader is not None and not self._reader.done()

    def _end_for_others(self, error: Exception) -> None:
        if self._holding.keeps or self._is_awaited:
            self.fail(error)
        else:
            self._fail_as_slow(error)

    def _fail_as_slow(self, error: Exception) -> None:
        if self.error is None and not self._is_closed:
            self.fail(error)
            self.on_slow()

    def fail(self, error: Exception) -> None:
        """Fail the stream: the next read raises, unread outputs are dropped, requests are aborted."""
        if self.error is None and not self._is_closed:
            self.error = error
            self._drop()
            self._abort_open()
            self.wake()

    def close(self) -> None:
        """Close the stream: unfinished requests are aborted, and a pending read returns None."""
        if not self._is_closed:
            self._is_closed = True
            self._drop()
            self._abort_open()
            self.wake()

    def forget(self, request_id: str) -> int:
        """Remove a request; returns how many of its samples had not ended."""
        return self._num_open.pop(request_id, 0)

    def wake(self) -> None:
        """Wake a pending read, even without outputs."""
        if self._reader is None or self._reader.done():
            return
        if self._take is not None and self._pending and self._num_open:
            pending = self._taken()
            try:
                is_taken = self._take(pending)
            except Exception as error:
                self.fail(error)
                return
            if is_taken:
                self._sent()
                return
        self._reader.set_result(None)

    async def read(self, take: Take | None = None) -> list[ChoiceOutput] | None:
        """Return all outputs since the last read, waiting for at least one; None after the end.

        It returns an empty list from time to time, so that the reader may keep a connection alive.

        Args:
            take: called with outputs that arrive while this waits, except the last ones, which are returned.
                That saves waking the reader's task. If it returns False, this returns; if it raises an error,
                the stream fails with that.

        Raises:
            RequestFailedError: one of the requests failed; the others are aborted.
            SlowReaderError, AnswerTooLargeError, AnswerMemoryFullError: see the class.
            EngineDiedError: the engine's thread has ended.
        """
        self._sent()
        if not (self._pending or self._is_closed or self.error is not None) and self._num_open:
            self._take, self._reader = take, asyncio.get_running_loop().create_future()
            await self._reader
        if self.error is not None:
            raise self.error
        if self._is_closed or not (self._pending or self._num_open):
            return None
        return self._taken()

    def _taken(self) -> list[ChoiceOutput]:
        """Return and clear queued outputs, which are being sent then."""
        pending, self._pending = self._pending, []
        self._num_sending += self._holding.passing(one.output for one in pending)
        return pending

    def _sent(self) -> None:
        """Free the bytes of outputs that were read."""
        num_bytes, self._num_sending = self._num_sending, 0
        self._holding.sent(num_bytes)

    def _drop(self) -> None:
        """Free the bytes of queued and of read outputs."""
        self._taken()
        self._sent()

    def _abort_open(self) -> None:
        if self._num_open:
            self._abort(tuple(self._num_open))


def _failure(error: Exception) -> RequestFailedError:
    failure = RequestFailedError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure

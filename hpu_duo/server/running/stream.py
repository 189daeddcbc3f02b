"""Outputs of the requests of one call, on their way to one reader, and their memory."""

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
"""Most bytes of an unread output, of a kept token, of a character of text, and of a log-probability with its
name and bytes in the body; CPython 3.12 takes three quarters of the first and the last."""

ENDED = "the answer was ended: "
"""Beginning of the error of a call that had run: elsewhere it would only be computed again."""


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
        """Refuse a call that comes while seven eighths of the memory are taken; the rest is for running ones.

        Raises:
            AnswerMemoryFullError: they are.
        """
        if self.num_bytes >= self.max_bytes - self.max_bytes // 8:
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
        largest.error = self._refusal(ENDED)
        largest.on_ended(largest.error)

    def _refusal(self, begin: str = "") -> AnswerMemoryFullError:
        return AnswerMemoryFullError(
            f"{begin}expected answers of all calls together of at most {self.max_bytes:,} bytes in memory "
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


class ChoiceOutput(NamedTuple):
    """An output, and the choice of the answer that it belongs to."""

    choice: int
    output: RequestOutput


Take = Callable[[list[ChoiceOutput]], bool]
"""Takes a batch of outputs at once, without waiting; says whether it could."""


class OutputStream:
    """Outputs of one or several requests, for one reader of the same event loop.

    A reader that is slow gets more at a time, and the engine never waits for it: outputs lie here until they
    are read, at most ``max_behind`` of them, or four for each sample if that is more. With one more the
    stream fails with a ``SlowReaderError``, as it does when they take too many bytes; where read outputs are
    kept, those fail it with an ``AnswerTooLargeError``, or an ``AnswerMemoryFullError`` when all calls
    together take too many. What was read counts until the next read: until then it is being sent.

    Args:
        submissions: the requests.
        max_behind: most outputs that lie here unread.
        holding: counts the bytes of outputs.
        abort: ends requests of these names in the engine.
        timing: told when tokens come.

    Attributes:
        timing: when they came.
        error: why it failed; None unless it has.
        on_slow: called when the stream fails for its reader's slowness; a reader that waits for something
            else, such as a socket, does not notice by itself.
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
        # Bytes of what was read and is being sent.
        self._num_sending = 0
        self.error: Exception | None = None
        self._is_closed = False
        self._reader: asyncio.Future[None] | None = None
        self._take: Take | None = None

    @property
    def num_open(self) -> int:
        """Samples that have not ended."""
        return sum(self._num_open.values())

    @property
    def is_closed(self) -> bool:
        """Whether the reader has closed it, or is gone."""
        return self._is_closed

    def push(self, output: RequestOutput, at: float) -> bool:
        """Take in an output, for the reader to get with ``wake``; says whether its request has ended.

        Args:
            at: when its step had ended, by ``time.perf_counter``.
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
                    f"a stream was read too slowly: {len(self._pending):,} outputs wait to be sent, and the "
                    f"answer takes {num_bytes:,} bytes in memory"
                )
            )

    @property
    def _is_awaited(self) -> bool:
        """Whether the reader waits for outputs: all that came before is sent."""
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
        """Let the reader get an error next; what it has not read is dropped, and its requests are aborted."""
        if self.error is None and not self._is_closed:
            self.error = error
            self._drop()
            self._abort_open()
            self.wake()

    def close(self) -> None:
        """Say that nobody reads any more: requests that run are aborted, and a read ends with nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._drop()
            self._abort_open()
            self.wake()

    def forget(self, request_id: str) -> int:
        """Expect nothing more of a request; says how many of its samples had not ended."""
        return self._num_open.pop(request_id, 0)

    def wake(self) -> None:
        """Give a read that waits what has come, or let it return, with nothing if there is nothing."""
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
        """Return all that has come since the last read, waiting for something; None behind the end.

        An empty list is no news: it comes from time to time, so that a connection may be kept alive.

        Args:
            take: gets what comes while this waits, but for the last outputs, which are returned. That is a
                plain call, where a return wakes the reader's task. When it returns False, this returns;
                when it raises an error, the stream fails with that.

        Raises:
            RequestFailedError: one of the requests failed; the others have been aborted.
            SlowReaderError, AnswerTooLargeError, AnswerMemoryFullError: see the class.
            EngineDiedError: the engine is gone.
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
        """Empty what lies here, to be sent."""
        pending, self._pending = self._pending, []
        self._num_sending += self._holding.passing(one.output for one in pending)
        return pending

    def _sent(self) -> None:
        """Give up what was taken."""
        num_bytes, self._num_sending = self._num_sending, 0
        self._holding.sent(num_bytes)

    def _drop(self) -> None:
        """Give up what lies here, and what was taken."""
        self._taken()
        self._sent()

    def _abort_open(self) -> None:
        if self._num_open:
            self._abort(tuple(self._num_open))


def _failure(error: Exception) -> RequestFailedError:
    failure = RequestFailedError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure

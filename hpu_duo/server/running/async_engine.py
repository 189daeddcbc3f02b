"""The asynchronous interface of an engine in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Protocol, TypeVar
from weakref import WeakMethod

from hpu_duo.device.ranks import RankError
from hpu_duo.engine.outputs import RequestOutput
from hpu_duo.request import FinishReason
from hpu_duo.sampling import SamplingParams
from hpu_duo.server.running.admission import EngineDiedError, RequestFailedError, Submission, Timing
from hpu_duo.server.running.stream import AnswerMemory, Holding, OutputStream

if TYPE_CHECKING:
    from hpu_duo.engine.engine import Engine
    from hpu_duo.engine.stats import EngineStats

Command = Callable[["Engine"], None]
"""A command to run between two steps; it must not raise."""

_SNAPSHOT_S = 0.25
_WRITE_S = 5.0
"""Most seconds that a thread that is stopped still writes cached prefixes to disk."""
_MOST_FAILURES = 8
"""Most successive failed steps. The engine isolates a request that makes steps fail in fewer."""


class Listener(Protocol):
    """A listener for steps, called in the engine's thread."""

    def stepped(self, outputs: list[RequestOutput], at: float) -> None:
        """Outputs of a step that ended at ``at``, by ``time.perf_counter``."""

    def keeps_failing(self, error: Exception) -> None:
        """Successive steps failed, not because of a request that the engine could isolate."""

    def died(self, error: BaseException) -> None:
        """The thread ends by an error: nothing is served any more."""


class EngineThread:
    """Steps an engine while it has unfinished requests, and runs commands between steps.

    Args:
        engine: only this thread steps it; other threads may call its other methods.
        listener: notified of steps and errors.
        plan_s: seconds after which an idle engine looks whether a bucket table has been planned.

    Attributes:
        snapshot: statistics, at most a quarter of a second old while steps are short.
        step_began: when the running step began, by ``time.perf_counter``; None between steps.
    """

    def __init__(self, engine: Engine, listener: Listener, plan_s: float = 1.0) -> None:
        self._engine, self._listener, self._plan_s = engine, listener, plan_s
        self.snapshot: EngineStats = engine.stats()
        self.step_began: float | None = None
        self._snapshot_at = time.perf_counter()
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._is_stopped = self._is_to_stop = False
        self._num_failures = 0
        # A daemon, so that a step that hangs on a device does not block the exit of the process.
        self._thread = Thread(target=self._run, name="hpu-duo-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ask(self, command: Command) -> None:
        """Queue a command to run between two steps; returns at once."""
        self._commands.put(command)

    def stop(self, timeout_s: float | None = None) -> bool:
        """Stop the thread after the running step, if any; returns whether it has stopped in time."""
        self._is_to_stop = True
        self.ask(self._stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _stop(self, _: Engine) -> None:
        self._is_stopped = True

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self._carry_out()
                if not self._is_stopped and self._engine.has_unfinished:
                    self._step()
            until = time.perf_counter() + _WRITE_S
            while self._engine.has_disk and time.perf_counter() < until and self._engine.settle_idle():
                pass
        except BaseException as error:
            if self._is_to_stop:
                _log.warning("the engine was stopped in a step: %s", error)
            else:
                _log.critical("the engine's thread has ended with an error", exc_info=error)
            self._listener.died(error)

    def _carry_out(self) -> None:
        """Run queued commands; wait for one if the engine is idle."""
        if self._commands.empty() and not self._engine.has_unfinished:
            while self._commands.empty() and self._engine.settle_idle():
                pass
            while self._commands.empty() and self._engine.replan_idle():
                pass
            self._take_snapshot()
            try:
                command = self._commands.get(timeout=self._plan_s if self._engine.is_planning else None)
            except Empty:
                return
            command(self._engine)
        while not self._commands.empty():
            self._commands.get()(self._engine)

    def _step(self) -> None:
        self.step_began = time.perf_counter()
        try:
            outputs = self._engine.step()
        except RankError:
            raise  # no later step can be computed either
        except Exception as error:
            self._failed(error)
            return
        finally:
            self.step_began = None
        now = time.perf_counter()
        if outputs:
            self._num_failures = 0
            self._listener.stepped(outputs, now)
        if now - self._snapshot_at > _SNAPSHOT_S:
            self._take_snapshot()

    def _failed(self, error: Exception) -> None:
        """Handle a failed step, which the engine retries."""
        self._num_failures += 1
        _log.error("step failed, number %d in a row: %s", self._num_failures, error, exc_info=error)
        if self._num_failures >= _MOST_FAILURES:
            self._num_failures = 0
            self._listener.keeps_failing(error)

    def _take_snapshot(self) -> None:
        self.snapshot = self._engine.stats()
        self._snapshot_at = time.perf_counter()


_log = logging.getLogger(__name__)

_DEAD_STEP_S, _STEP_S = 0.2, 1.0
"""Most seconds that the thread of an engine that has ended with an error is waited for, and a step between
ranks that nobody waits for any more."""

_T = TypeVar("_T")

_SHORT_TOKENS = 4096
"""Prompts of up to this number of tokens are validated in the event loop: a thread would cost more."""


class AsyncEngine:
    """The asynchronous interface of an engine, which runs in a thread of its own.

    All methods are called in the event loop of ``start``; only coroutines wait for a step.

    Args:
        engine: stepped by a thread of this object from ``start`` on.
        max_behind: most unread outputs of a stream.
        max_answer_bytes: most bytes of the outputs of one call, see ``Holding``.
        answer_memory_bytes: most bytes of the outputs of all calls, see ``AnswerMemory``.
        no_news_s: interval at which readers are woken without outputs.
        short_tokens: requests of at most this number of prompt tokens are validated in the event loop.

    Attributes:
        memory: of the outputs of all calls.
    """

    def __init__(
        self,
        engine: Engine,
        max_behind: int = 8192,
        max_answer_bytes: int = 256 * 2**20,
        answer_memory_bytes: int = 2**30,
        no_news_s: float = 5.0,
        short_tokens: int = _SHORT_TOKENS,
    ) -> None:
        self._engine, self._max_behind, self._no_news_s = engine, max_behind, no_news_s
        self._max_answer_bytes = max_answer_bytes
        self.short_tokens = short_tokens
        self.memory = AnswerMemory(answer_memory_bytes)
        self._thread = EngineThread(engine, self)
        self._streams: dict[str, OutputStream] = {}
        self._arrived: deque[tuple[list[RequestOutput], float]] = deque()
        self._num_open = 0
        self._death: EngineDiedError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._no_news: asyncio.TimerHandle | None = None

    @property
    def stats(self) -> EngineStats:
        """Recent statistics."""
        return self._thread.snapshot

    @property
    def num_open(self) -> int:
        """Number of unfinished samples, running or waiting."""
        return self._num_open

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive and self._death is None

    @property
    def step_began(self) -> float | None:
        """Start of the running step, by ``time.perf_counter``."""
        return self._thread.step_began

    def start(self) -> None:
        """Start to serve."""
        self._loop = asyncio.get_running_loop()
        self._no_news = self._loop.call_later(self._no_news_s, self._wake_readers)
        self._thread.start()
        # Between steps, or in one that never ends, the thread would not detect it.
        self._engine.when_ranks_are_lost(partial(_died, WeakMethod(self.died)))

    async def stop(self, timeout_s: float = 10.0) -> bool:
        """Close every stream and stop the thread; returns whether it has stopped in time."""
        if self._no_news is not None:
            self._no_news.cancel()
        for stream in list(self._streams.values()):
            stream.close()
        # After an error a step may never end, such as one on a device that waits for a lost rank.
        wait_s = min(timeout_s, _STEP_S if self._death is None else _DEAD_STEP_S)
        has_ended = await asyncio.to_thread(self._thread.stop, wait_s)
        if has_ended or self._death is not None:
            return has_ended
        # One of several ranks may wait for a rank that is stopped or hangs.
        rest_s = _STEP_S if self._engine.kill_ranks() else timeout_s - wait_s
        return await asyncio.to_thread(self._thread.stop, rest_s)

    async def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Validate a request; see ``Engine.check_request``."""
        check = partial(self._engine.check_request, prompt_token_ids, params, name="the prompt")
        if len(prompt_token_ids) * params.n <= self.short_tokens:
            check()
        else:
            await asyncio.to_thread(check)

    def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar of parameters; thread-safe; see ``Engine.prepare``."""
        self._engine.prepare(params)

    async def scored(self, submissions: Sequence[Submission]) -> Sequence[Submission]:
        """Score validated prompts by the engine's ranker, in another thread than the engine's."""
        if not self._engine.has_ranker:
            return submissions
        prompts = [one.prompt_token_ids for one in submissions]
        scores = await asyncio.to_thread(self._engine.rank, prompts)
        return [replace(one, score=score) for one, score in zip(submissions, scores)]

    def hold(self) -> Holding:
        """Create the memory account of a call's outputs."""
        return self.memory.hold(self._max_answer_bytes)

    def open(
        self,
        submissions: Sequence[Submission],
        timing: Timing | None = None,
        holding: Holding | None = None,
    ) -> OutputStream:
        """Submit requests; returns the stream of their outputs, for one reader.

        Requests that the engine rejects, although ``check`` did not, fail with a ``RequestFailedError`` of
        the stream.

        Args:
            timing: notified of tokens.
            holding: of the call, by ``hold``; None creates one.

        Raises:
            EngineDiedError: nothing is served any more.
        """
        if self._death is not None:
            raise self._death
        holding = holding or self.hold()
        stream = OutputStream(submissions, self._max_behind, holding, self._abort, timing or Timing())
        for one in submissions:
            self._streams[one.request_id] = stream
            self._num_open += one.params.n
            self._thread.ask(partial(self._add, one))
        return stream

    def fail_all(self, error: Exception) -> None:
        """End every stream with an error, and abort its requests."""
        for stream in set(self._streams.values()):
            stream.fail(error)

    async def ask(self, question: Callable[[Engine], _T]) -> _T:
        """Call a function with the engine between two steps, in the engine's thread.

        Raises:
            EngineDiedError: nothing is served any more.
        """
        if self._death is not None:
            raise self._death
        assert self._loop is not None, "start comes first"
        answer: asyncio.Future[_T] = self._loop.create_future()

        def carry_out(engine: Engine) -> None:
            try:
                found = question(engine)
            except Exception as error:
                self._call_soon(_settle, answer, None, error)
            else:
                self._call_soon(_settle, answer, found, None)

        self._thread.ask(carry_out)
        return await answer

    # In the engine's thread

    def stepped(self, outputs: list[RequestOutput], at: float) -> None:
        """Pass the outputs of a step to the event loop."""
        self._arrived.append((outputs, at))
        self._call_soon(self._deliver)

    def keeps_failing(self, error: Exception) -> None:
        """Fail all open streams."""
        failure = RequestFailedError(f"steps keep failing: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._call_soon(self.fail_all, failure)

    def died(self, error: BaseException) -> None:
        """Fail all open streams, permanently."""
        death = EngineDiedError(f"the engine has ended: {type(error).__name__}: {error}")
        death.__cause__ = error
        self._call_soon(self._die, death)

    def _add(self, one: Submission, engine: Engine) -> None:
        try:
            engine.add_request(
                one.prompt_token_ids, one.params, one.request_id, name="the prompt", score=one.score
            )
        except Exception as error:
            failed = RequestOutput(one.request_id, 0, (), finish_reason=FinishReason.ERROR, error=error)
            self._call_soon(self._refused, failed)

    def _call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None, "start comes first"
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    # In the event loop

    def _deliver(self) -> None:
        """Pass all outputs to streams: of several steps at once if the loop is late."""
        reached: dict[OutputStream, None] = {}
        for _ in range(len(self._arrived)):
            self._sort(*self._arrived.popleft(), reached)
        for stream in reached:
            stream.wake()

    def _sort(self, outputs: list[RequestOutput], at: float, reached: dict[OutputStream, None]) -> None:
        streams = self._streams
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is None:
                continue  # of an aborted request, or of another user of the engine
            self._num_open -= output.finish_reason is not None
            reached[stream] = None
            if stream.push(output, at):
                del streams[output.request_id]

    def _refused(self, failed: RequestOutput) -> None:
        stream = self._streams.get(failed.request_id)
        if stream is not None:
            self._forget(failed.request_id)
            assert failed.error is not None, "expected a rejected request"
            failure = RequestFailedError(str(failed.error))
            failure.__cause__ = failed.error
            stream.fail(failure)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
            self._thread.ask(partial(_abort, request_id))

    def _forget(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._num_open -= stream.forget(request_id)

    def _die(self, death: EngineDiedError) -> None:
        if self._death is None:
            self._death = death
            self.fail_all(death)

    def _wake_readers(self) -> None:
        assert self._loop is not None, "start comes first"
        for stream in set(self._streams.values()):
            stream.wake()
        self._no_news = self._loop.call_later(self._no_news_s, self._wake_readers)


def _died(died: WeakMethod[Callable[[BaseException], None]], error: BaseException) -> None:
    """Abort requests if the engine still exists."""
    if (callback := died()) is not None:
        _log.critical("%s", error)
        callback(error)


def _abort(request_id: str, engine: Engine) -> None:
    engine.abort(request_id)


def _settle(answer: asyncio.Future[_T], found: _T | None, error: Exception | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(found)  # type: ignore[arg-type]

"""The thread that steps an engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Protocol

from hpu_duo.device.ranks import RankError
from hpu_duo.engine.outputs import RequestOutput

if TYPE_CHECKING:
    from hpu_duo.engine.engine import Engine
    from hpu_duo.engine.stats import EngineStats

_log = logging.getLogger(__name__)

Command = Callable[["Engine"], None]
"""Something to be done between two steps; it may not raise."""

_SNAPSHOT_S = 0.25
_MOST_FAILURES = 8
"""Failing steps without an output between them. The engine finds a request that makes steps fail in fewer."""


class Listener(Protocol):
    """A listener to steps, called in the engine's thread."""

    def stepped(self, outputs: list[RequestOutput], at: float) -> None:
        """A step, ended at ``at`` by ``time.perf_counter``, gave these."""

    def keeps_failing(self, error: Exception) -> None:
        """Steps fail one after the other, and for no request's sake that the engine could name."""

    def died(self, error: BaseException) -> None:
        """The thread ends with an error: nothing is served any more."""


class EngineThread:
    """Steps an engine while it has something to do, and carries out commands between steps.

    Args:
        engine: only this thread steps it; other threads may call its methods all the same.
        listener: hears of what happens.

    Attributes:
        snapshot: statistics, a quarter of a second old at most while steps are short.
        step_began: when the step that runs has begun, by ``time.perf_counter``; None between steps.
    """

    def __init__(self, engine: Engine, listener: Listener) -> None:
        self._engine, self._listener = engine, listener
        self.snapshot: EngineStats = engine.stats()
        self.step_began: float | None = None
        self._snapshot_at = time.perf_counter()
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._is_stopped = False
        self._num_failures = 0
        # A daemon, so that a step that hangs on a device cannot keep the process.
        self._thread = Thread(target=self._run, name="hpu-duo-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether steps are made."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def ask(self, command: Command) -> None:
        """Have something done between two steps, in order; returns at once."""
        self._commands.put(command)

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread behind the step that runs, if any; says whether it has ended in time."""
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
        except BaseException as error:
            _log.critical("the engine's thread has ended with an error", exc_info=error)
            self._listener.died(error)

    def _carry_out(self) -> None:
        """Do what was asked for; wait for it if there is nothing else to do."""
        if self._commands.empty() and not self._engine.has_unfinished:
            self._take_snapshot()
            self._commands.get()(self._engine)
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
        """Take a failing step; the engine computes it anew, and finds out whose fault it is."""
        self._num_failures += 1
        _log.error("a step has failed, the %d. in a row: %s", self._num_failures, error, exc_info=error)
        if self._num_failures >= _MOST_FAILURES:
            self._num_failures = 0
            self._listener.keeps_failing(error)

    def _take_snapshot(self) -> None:
        self.snapshot = self._engine.stats()
        self._snapshot_at = time.perf_counter()

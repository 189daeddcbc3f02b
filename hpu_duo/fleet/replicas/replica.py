"""The life of a replica: started, watched, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hpu_duo.device.processes import bind_process
from hpu_duo.fleet.replicas.relaying import Upstream

HOST = "127.0.0.1"


@dataclass(frozen=True)
class ReplicaCommand:
    """Program, variables and cores that a replica is started with.

    Attributes:
        arguments: the program and its arguments, without the address: ``--fd`` and ``--ends-with-stdin`` are
            appended.
        environment: all of the variables.
        cores: CPU cores to run on; none is wherever the system likes.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    cores: Collection[int] = field(default=())


class ReplicaProcess:
    """A server of its own in a process, which ends with this one.

    It listens on a socket that is bound here and inherited, so its port is known and reserved. By a pipe it
    detects the end of this process, however that happens.

    Attributes:
        url: of the server.
        pid: of the process.
    """

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self.url = f"http://{HOST}:{port}"
        self.pid = process.pid

    @classmethod
    async def start(cls, command: ReplicaCommand) -> ReplicaProcess:
        """Start one.

        Raises:
            OSError: the system cannot start it.
        """
        with socket.socket() as bound:
            bound.bind((HOST, 0))
            listening = ("--fd", str(bound.fileno()), "--ends-with-stdin")
            process = await asyncio.create_subprocess_exec(
                *command.arguments,
                *listening,
                stdin=subprocess.PIPE,
                env=command.environment,
                pass_fds=[bound.fileno()],
                # Ctrl-C is handled by the front process, which drains calls first.
                start_new_session=True,
            )
            bind_process(process.pid, command.cores)
            return cls(process, bound.getsockname()[1])

    async def ended(self) -> int:
        """Wait for its end; returns the exit code, negative for a signal."""
        return await self._process.wait()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    def terminate(self) -> None:
        """Let it end its calls, and then itself."""
        if self.is_alive:
            self._process.terminate()

    def kill(self) -> None:
        """End it now, and the processes that it has started: ranks that share its model."""
        # It leads a group of its own, which outlives it as long as one of them does.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


_log = logging.getLogger(__name__)

_READY_LOOK_S, _HEALTH_LOOK_S, _HEALTH_S = 0.1, 1.0, 5.0
_MOST_SILENT = 3
"""Most successive health checks without a response."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 30.0
"""Before a restart: doubled each time, up to the second, and as at first when it had been ready."""
USER_ERROR = 2
"""Exit code of a command that was wrong; starting it again would not help."""


class ReplicaState(Enum):
    """State of a replica; ``ready`` alone is sent calls."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"


class Replica:
    """One replica.

    Args:
        name: of the replica.
        command: starts it.
        upstream: for health checks.
        on_ready, on_lost: called when it may be sent calls, and when it may not any more.
        load_timeout_s: timeout of the first response of a process; warming up may take longer.

    Attributes:
        state: see ``ReplicaState``.
        num_restarts: times that it was started again.
        was_ready: whether it has ever been ready.
        exit_code: of its last process that ended; None before.
    """

    def __init__(
        self,
        name: str,
        command: ReplicaCommand,
        upstream: Upstream,
        on_ready: Callable[[Replica], None],
        on_lost: Callable[[Replica], None],
        load_timeout_s: float,
    ) -> None:
        self.name, self._command, self._upstream = name, command, upstream
        self._on_ready, self._on_lost = on_ready, on_lost
        self._load_timeout_s = load_timeout_s
        self.state = ReplicaState.DOWN
        self.num_restarts = 0
        self.was_ready = False
        self.exit_code: int | None = None
        self._process: ReplicaProcess | None = None
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def is_refused(self) -> bool:
        """Whether its command was wrong, so that starting it again would not help."""
        return self.exit_code == USER_ERROR and not self.was_ready

    @property
    def url(self) -> str:
        """Address of the process that runs."""
        assert self._process is not None, "it was started"
        return self._process.url

    @property
    def pid(self) -> int | None:
        """Number of the process that runs; None without one."""
        return None if self._process is None or not self._process.is_alive else self._process.pid

    def start(self) -> None:
        """Start it, and again whenever it ends, until it is stopped."""
        self._task = asyncio.create_task(self._live())

    async def stop(self, grace_s: float) -> None:
        """Let it end, and kill it if it has not after a time."""
        self._is_stopping = True
        if self._task is None:
            return
        if self._process is not None:
            self._process.terminate()
        done, _ = await asyncio.wait({self._task}, timeout=grace_s)
        if not done:
            if self._process is not None:
                self._process.kill()
            done, _ = await asyncio.wait({self._task}, timeout=_HEALTH_S)
        if not done:
            self._task.cancel()

    async def _live(self) -> None:
        delay_s = _FIRST_DELAY_S
        while not self._is_stopping:
            was_ready = False
            try:
                was_ready = await self._run()
            except OSError as error:
                _log.error("replica %s cannot be started: %s", self.name, error)
            if self._is_stopping or self.is_refused:
                return
            if was_ready:
                delay_s = _FIRST_DELAY_S
            _log.warning("replica %s has ended (%s); again in %.1f s", self.name, self.exit_code, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
            self.num_restarts += 1

    async def _run(self) -> bool:
        """Run one process to its end; returns whether it was ready before."""
        self.state = ReplicaState.STARTING
        try:
            process = self._process = await ReplicaProcess.start(self._command)
            if self._is_stopping:
                process.terminate()
            watching = asyncio.create_task(self._watch(process))
            try:
                self.exit_code = await process.ended()
            finally:
                # If this task was cancelled, and for ranks that would still occupy their devices.
                process.kill()
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching
        finally:
            was_ready = self.state is ReplicaState.READY
            self.state = ReplicaState.DOWN
            if was_ready:
                self._on_lost(self)
        return was_ready

    async def _watch(self, process: ReplicaProcess) -> None:
        """Wait until it is ready, and kill it if it fails its health check or does not respond."""
        loop, has_answered = asyncio.get_running_loop(), False
        deadline = loop.time() + self._load_timeout_s
        while not await self._says_yes(process, "/ready"):
            has_answered = has_answered or await self._says_yes(process, "/live")
            if not has_answered and loop.time() > deadline:
                limit_s = self._load_timeout_s
                _log.error("replica %s has not loaded within %g s; it is ended", self.name, limit_s)
                process.kill()
                return
            await asyncio.sleep(_READY_LOOK_S)
        self.state, self.was_ready = ReplicaState.READY, True
        self._on_ready(self)
        num_silent = 0
        while num_silent < _MOST_SILENT:
            await asyncio.sleep(_HEALTH_LOOK_S)
            is_well = await self._says_yes(process, "/live")
            num_silent = 0 if is_well else num_silent + 1
            if self._is_stopping:
                return  # it drains its calls, within a timeout
        _log.error("replica %s does not respond, and is killed", self.name)
        process.kill()

    async def _says_yes(self, process: ReplicaProcess, path: str) -> bool:
        found = await self._upstream.text(process.url + path, _HEALTH_S)
        return found is not None and found[0] == 200

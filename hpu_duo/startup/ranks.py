"""Ranks of an engine as rank 0 leads them, from their start to their end, and as the others follow it.

Rank 0 has requests and scheduler. The others are processes of their own, each with a device of its own, and
do what rank 0 tells them (``engine/orders.py``).
"""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch
import torch.distributed as dist

from hpu_duo.device.blame import Report, Signs, blamed
from hpu_duo.device.lifelines import Lifeline, Lifelines, may_follow
from hpu_duo.device.ranks import MEETING_S, Membership, RankError, Ranks, Sent, joined
from hpu_duo.engine.orders import Execute, Order, Stop
from hpu_duo.startup.launches import Launch, until

_SETTLE_S = 0.3
_NAMING_S = 3.0
"""Seconds in which ranks whose peers notice the end of another one report their errors."""
_MARGIN_S = 5.0
"""Seconds that an exchange waits for longer than a silent rank is waited for, so that silence comes first."""


class LedRanks:
    """The ranks behind rank 0; see ``Followers``.

    A rank that ends, or gives no sign of life, ends the others, and every order from then on is refused with
    an error that names it.

    Args:
        launch: of their processes.
        size: number of ranks.
        timeout_s: most seconds of a rank without a sign of life, of a step, and, with some more, of an
            exchange inside a step.

    Attributes:
        membership: of rank 0, once it has joined.
        is_led: whether all ranks are built, and wait for orders.
    """

    def __init__(self, launch: Launch, size: int, timeout_s: float) -> None:
        self.size, self._launch, self._timeout_s = size, launch, timeout_s
        self._broken: RankError | None = None
        self._own: Report | None = None
        self._told: list[Callable[[RankError], None]] = []
        self._lock = threading.Lock()
        self._is_stopped = self._is_over = False
        self._stack = ExitStack()
        self.membership: Membership | None = None
        self.is_led = False
        self._stack.callback(launch.close)
        try:
            self._lifelines = Lifelines(launch.host, size, launch.store)
        except BaseException:
            self._stack.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="hpu-duo-ranks", daemon=True)
        self._watcher.start()

    @property
    def launch(self) -> Launch:
        """The launch of their processes."""
        return self._launch

    def join(self, backend: str, device: torch.device) -> Membership:
        """Join the others as rank 0, when all have come.

        Raises:
            RankError: a rank has failed, or has not come in time.
        """
        if not until(lambda: not self._lifelines.missing or self._broken is not None, MEETING_S):
            names = ", ".join(map(str, self._lifelines.missing))
            raise self._break(f"expected rank(s) {names} to come within {MEETING_S:.0f} s, and none has")
        if self._broken is not None:
            raise self._broken
        try:
            self.membership = self._stack.enter_context(
                joined_as(Ranks(0, self.size), backend, self._launch.store, device, self._timeout_s)
            )
        except BaseException as error:
            raise self.failed(error) from error
        return self.membership

    @property
    def sent(self) -> Sent:
        """See ``Followers``."""
        return Sent() if self.membership is None else self.membership.link.sent

    def tell(self, order: Order) -> None:
        """See ``Followers``."""
        if self._broken is not None:
            raise self._broken
        assert self.membership is not None, "ranks have joined"
        try:
            self._lifelines.lateness.tell(is_step=isinstance(order, Execute))
            self.membership.link.send(order)
        except Exception as error:
            raise self.failed(error) from error

    def failed(self, error: BaseException) -> RankError:
        """See ``Followers``."""
        if isinstance(error, RankError):
            return error
        words = f"{type(error).__name__}: {error}"
        if may_follow(error):
            # Who fails first tells of it, while others see only that its connection is closed.
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self._own = Report(0, words, trace, may_follow=True)
            until(lambda: self._broken is not None, 2 * _NAMING_S)
        return self._break(f"rank 0 failed: {words}")

    def when_lost(self, told: Callable[[RankError], None]) -> None:
        """See ``Followers``."""
        with self._lock:
            if self._broken is None:
                self._told.append(told)
                return
        told(self._broken)

    def cause(self, error: BaseException) -> BaseException:
        """Return the error of the rank that failed first, if an error of this one follows from it."""
        return self.failed(error) if may_follow(error) else error

    def stop(self) -> None:
        """End the other ranks, and leave; does nothing the second time."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._broken is None and self.is_led and self.membership is not None:
            with suppress(Exception):
                self.membership.link.send(Stop())
            if not until(lambda: self._lifelines.have_ended, _NAMING_S):
                # Whoever leaves the group waits for nobody who is stopped or hangs.
                self._launch.kill()
        else:
            self._launch.kill()
        self._is_over = True
        if threading.current_thread() is not self._watcher:
            self._watcher.join(_NAMING_S)
        self._stack.close()

    def _break(self, message: str) -> RankError:
        with self._lock:
            if self._broken is not None:
                return self._broken
            self._broken = RankError(f"{message}; all ranks have ended, start the process again")
            told, self._told = self._told, []
        self._launch.kill()
        for each in told:
            each(self._broken)
        return self._broken

    def _watch(self) -> None:
        """Notice a rank that ends, fails or hangs; ranks that are still there end with this loop."""
        bad_since: float | None = None
        try:
            while not self._is_over and self._broken is None:
                self._lifelines.look()
                if self._is_stopped:
                    continue
                early = self._launch.early_end() if self._lifelines.missing else None
                if early is not None:
                    self._break(f"rank {early.rank} {early.told}")
                    return
                signs = self._lifelines.signs().with_report(self._own)
                if not signs.are_bad(self._timeout_s):
                    bad_since = None
                    continue
                now = time.monotonic()
                bad_since = now if bad_since is None else bad_since
                self._judge(signs, now - bad_since)
        finally:
            self._lifelines.close()

    def _judge(self, signs: Signs, seconds: float) -> None:
        """Name the rank that has failed first, so many seconds after something went wrong."""
        if seconds < _SETTLE_S:
            return
        found = blamed(signs, self._timeout_s, is_all=seconds > _NAMING_S)
        if found is not None:
            told = self._launch.end_of(found.rank) if found.told is None else found.told
            self._break(f"rank {found.rank} {told}")


@contextmanager
def joined_as(
    ranks: Ranks, backend: str, store: dist.Store, device: torch.device, timeout_s: float
) -> Iterator[Membership]:
    """Join the others; exchanges wait for longer than it takes to notice that a rank is silent."""
    with joined(ranks, backend, store, device, timeout_s + _MARGIN_S) as membership:
        yield membership


@contextmanager
def lifeline_to_rank_0(rank: int, store: dist.Store, timeout_s: float) -> Iterator[Lifeline]:
    """Give signs of life as any rank but 0; errors that leave the context are reported to rank 0."""
    lifeline = Lifeline(rank, store, timeout_s)
    # Rank 0 says when to end: whoever stops all processes at once wants calls under way to end first.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    with lifeline.reporting():
        yield lifeline
    lifeline.close()

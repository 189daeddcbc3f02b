"""A thread-safe router, and the state of one call in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from hpu_duo.fleet.replicas.app import RoutedReplica
from hpu_duo.fleet.replicas.front import RoutedCall
from hpu_duo.fleet.replicas.relaying import DEPARTED, AnswerCounts, FrontCounts, add
from hpu_duo.fleet.routing import Dispatch, Router

_announced: dict[tuple[str, str], SharedRouter] = {}


class Ticket:
    """A call on its way through Ray: has the data for routing, and the chosen replica for the caller.

    It stays in its process: a replica receives None in its place.

    Args:
        call: data for routing.
        without: replicas to avoid, since they were tried in vain.
        only: a fixed replica, for queries of that one; such a call is not counted.

    Attributes:
        router: that it was shown to first; None before.
        dispatch: its state in the router; None before a replica was chosen, and for ``only``.
        replica: where it is served; None before.
        is_over: whether the call has ended.
    """

    def __init__(self, call: RoutedCall, without: tuple[str, ...] = (), only: str | None = None) -> None:
        self.call, self.without, self.only = call, without, only
        self.router: SharedRouter | None = None
        self.dispatch: Dispatch | None = None
        self.replica: str | None = None
        self.is_over = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def answered(self) -> None:
        """Called at the start of the response."""
        if self.router is not None:
            self.router.answered(self)

    def finished(self, counts: AnswerCounts) -> None:
        """Called at the end of a complete response."""
        if self.router is not None:
            self.router.finished(self, counts)

    def end(self) -> None:
        """Called at the end of the call: an unfinished one has failed."""
        self.is_over = True
        if self.router is not None:
            self.router.ended(self)


class SharedRouter:
    """A router shared by Ray's thread, which routes calls, and the one of their responses.

    Ray may route a call again if a replica has not accepted it, and may send it to another replica than the
    chosen one. The router's account follows: a call is open at one replica at most.

    Args:
        router: not shared otherwise.
        clock: seconds that never go back.

    Attributes:
        counts: of calls.
    """

    def __init__(self, router: Router, clock: Callable[[], float] = time.monotonic) -> None:
        self._router, self._clock = router, clock
        self._lock = threading.Lock()
        self.counts = FrontCounts()

    @property
    def replicas(self) -> tuple[str, ...]:
        """Replicas that calls may be sent to."""
        with self._lock:
            return tuple(self._router.replicas)

    def set_replicas(self, names: Iterable[str]) -> None:
        """Let exactly these replicas be there."""
        wanted = list(names)
        with self._lock:
            for gone in [each for each in self._router.replicas if each not in wanted]:
                self._leave(gone)
            for new in [each for each in wanted if each not in self._router.replicas]:
                self._router.join(new, self._clock())

    def lose(self, name: str) -> None:
        """Forget a replica that has died, if it is there."""
        with self._lock:
            if name in self._router.replicas:
                self._leave(name)

    def rank(self, ticket: Ticket | None, offered: Sequence[str]) -> list[str]:
        """Return the candidate replicas of a call, the router's choice first.

        Args:
            ticket: of the call; without one, and for one that is over, the account does not change.
            offered: replicas known to Ray.
        """
        with self._lock:
            known = [each for each in offered if each in self._router.replicas]
            if ticket is not None:
                # Before the check for its end: a call that ends meanwhile ends here, too.
                ticket.router = self
            if ticket is None or ticket.is_over or (ticket.only is None and not known):
                return sorted(known, key=self._router.num_open) or list(offered)
            if ticket.only is not None:
                return [each for each in offered if each == ticket.only]
            chosen = self._choose(ticket, known)
            others = [each for each in known if each != chosen]
            return [chosen, *sorted(others, key=lambda each: (each in ticket.without, self._open(each)))]

    def _choose(self, ticket: Ticket, known: Sequence[str]) -> str:
        """Choose a replica, and count the call as sent, so that the next choice includes it."""
        refused = set() if ticket.dispatch is None else {ticket.dispatch.replica}
        self._withdraw(ticket)
        avoided = [{*ticket.without, *refused}, set(ticket.without), set[str]()]
        avoid = next(each for each in avoided if not each.issuperset(known))
        unknown = set(self._router.replicas).difference(known)
        chosen = self._router.choose(ticket.call.request, self._clock(), avoid | unknown)
        ticket.dispatch = self._router.dispatched(ticket.call.request, chosen, self._clock())
        return chosen

    def sent(self, ticket: Ticket, replica: str) -> None:
        """Called when a replica serves a call."""
        with self._lock:
            ticket.router, ticket.replica = self, replica
            if ticket.only is not None or ticket.is_over or replica not in self._router.replicas:
                return
            request = ticket.call.request
            if ticket.dispatch is None or ticket.dispatch.replica != replica:
                self._withdraw(ticket)
                ticket.dispatch = self._router.dispatched(request, replica, self._clock())
            expected = ticket.dispatch.num_expected * request.tokens_per_unit
            self.counts.requests[replica] += 1
            add(self.counts.prompt_tokens, replica, request.num_tokens)
            add(self.counts.expected_tokens, replica, expected)

    def answered(self, ticket: Ticket) -> None:
        """Called at the start of a response."""
        with self._lock:
            if ticket.dispatch is not None:
                self._router.first_token(ticket.call.request.request_id, self._clock())

    def finished(self, ticket: Ticket, counts: AnswerCounts) -> None:
        """Called at the end of a complete response."""
        with self._lock:
            if ticket.dispatch is None:
                return
            request, cached = ticket.call.request, None
            if counts.num_cached_share is not None:
                cached = counts.num_cached_share * request.num_tokens
                replica = ticket.dispatch.replica
                add(
                    self.counts.cached_tokens,
                    replica if replica in self._router.replicas else DEPARTED,
                    cached,
                )
            self._router.finished(request.request_id, self._clock(), counts.num_outputs, cached)

    def ended(self, ticket: Ticket) -> None:
        """Called at the end of a call; an unfinished one has failed."""
        with self._lock:
            self._withdraw(ticket)

    def view(self) -> list[RoutedReplica]:
        """Return the replicas that calls may be sent to, and the load of each."""
        with self._lock:
            router, now = self._router, self._clock()
            return [
                RoutedReplica(each, router.num_open(each), router.load(each, now)) for each in router.replicas
            ]

    def _leave(self, replica: str) -> None:
        self._router.leave(replica, self._clock())
        # Names of replicas in Ray are unique.
        self.counts.depart(replica)

    def _open(self, replica: str) -> int:
        return self._router.num_open(replica)

    def _withdraw(self, ticket: Ticket) -> None:
        if ticket.dispatch is not None:
            self._router.failed(ticket.call.request.request_id, self._clock())
            ticket.dispatch = None


def announce(application: str, deployment: str, router: SharedRouter) -> None:
    """Register the router of a deployment in this process, since Ray does not expose its request routers.

    Ray pickles the modules of request routers and deployments by value, so that each has variables of its own
    there. A global of this module.
    """
    _announced[application, deployment] = router


def announced(application: str, deployment: str) -> SharedRouter | None:
    """Return the router before a deployment; None until Ray has created one in this process."""
    return _announced.get((application, deployment))

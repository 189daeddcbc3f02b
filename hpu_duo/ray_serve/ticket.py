"""The place of one call in the account of a router."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpu_duo.replicas.events import AnswerCounts
from hpu_duo.replicas.prompts import RoutedCall
from hpu_duo.routing import Dispatch

if TYPE_CHECKING:
    from hpu_duo.ray_serve.shared_router import SharedRouter


class Ticket:
    """A call on its way through Ray: tells the router what it asks for, and the caller where it was sent.

    It stays in the process that makes it: a replica is sent None in its place.

    Args:
        call: what routing goes by.
        without: replicas to avoid, since they were tried in vain.
        only: the replica to take whatever the router would choose, for questions about that one; such a call
            is not in the account.

    Attributes:
        router: that it was shown to first; None before.
        dispatch: what the router knows of it; None before a replica was chosen, and for ``only``.
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
        """Take note that the answer has begun."""
        if self.router is not None:
            self.router.answered(self)

    def finished(self, counts: AnswerCounts) -> None:
        """Take note of an answer that is complete."""
        if self.router is not None:
            self.router.finished(self, counts)

    def end(self) -> None:
        """Take note that nobody waits any more: a call that has not finished has failed."""
        self.is_over = True
        if self.router is not None:
            self.router.ended(self)

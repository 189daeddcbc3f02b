"""The choices of a scheduler that a policy makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from hpu_duo.request import Request

if TYPE_CHECKING:
    from hpu_duo.scheduling.waiting import Waiting


class SchedulingPolicy(ABC):
    """Order of waiting requests, whom to preempt, and what to charge for.

    A policy chooses between requests and owns none of them: rows, blocks, budgets and the guarantee of
    progress stay with the scheduler. So a policy may be unfair, but it cannot stall the engine. When blocks
    run out, the earliest arrival among running requests is never offered for preemption and gets its tokens.
    A running request is offered to ``displaced`` only if it has got a token since it got its row, or to one
    that never had a row, so requests cannot take turns in displacing each other without end. Whoever is
    chosen to be admitted next is waited for until it fits.

    ``next`` is the only method that a policy has to have. The last four tell it what happens: a request is
    queued, admitted, perhaps preempted and queued again, and ends once, wherever it is.

    Attributes:
        honours_priority: whether ``SamplingParams.priority`` has a meaning; requests that set it are refused
            where it has none.
        displaces: whether ``displaced`` ever names anybody.
        needs_scores: whether it reads ``Request.score``, which a ranker gives.
        name: what it was made from.
    """

    displaces: ClassVar[bool] = False
    honours_priority: bool = False
    needs_scores: bool = False
    name: str = "of its own"

    @abstractmethod
    def next(self, waiting: Waiting) -> Request:
        """Choose the waiting request to admit next; nobody else is admitted before it.

        Asked again after each admission, and in every step.

        Args:
            waiting: at least one request; those that were preempted are back among them.
        """

    def victim(self, running: Sequence[Request]) -> Request:
        """Choose whom to preempt, because another one lacks a block; it may be that one itself.

        The latest arrival, unless a policy says otherwise.

        Args:
            running: those that may be, at least one, in order of arrival.
        """
        return running[-1]

    def displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Choose who gives its row and blocks to a waiting request that does not fit; None = it waits.

        Asked again until it fits; nobody is preempted if it would not fit in the end.

        Args:
            request: the one that ``next`` chose.
            running: those that may be displaced, in order of arrival.
        """
        return None

    def begin_step(self) -> None:  # noqa: B027
        """Take note that a step is planned."""

    def queued(self, request: Request) -> None:  # noqa: B027
        """Take note that a request waits, because it is new or was preempted."""

    def admitted(self, request: Request) -> None:  # noqa: B027
        """Take note that a request has got a row; ``num_computed_tokens`` of its tokens are in the cache."""

    def charge(self, request: Request, num_computed: int, num_sampled: int) -> None:  # noqa: B027
        """Take note of what a step has done for a request, once its tokens are appended.

        Args:
            num_computed: tokens whose keys and values were computed, again where it had been preempted.
            num_sampled: tokens that it got.
        """

    def ended(self, request: Request) -> None:  # noqa: B027
        """Take note that a request has ended, waiting or running, with all of its tokens or early."""

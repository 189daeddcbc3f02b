"""The choices of a scheduler that a policy makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hpu_duo.request import Request
from hpu_duo.scheduling.arrivals import ArrivalOrder


class SchedulingPolicy(Protocol):
    """Order of waiting requests, whom to preempt, and what to charge for.

    A policy chooses between requests and owns none of them: rows, blocks, budgets and the guarantee of
    progress stay with the scheduler. So a policy may be unfair, but it cannot stall the engine. The earliest
    arrival among running requests is never offered for preemption and gets its tokens in every step; whoever
    is chosen to be admitted next is waited for until it fits.
    """

    def next(self, waiting: ArrivalOrder) -> Request:
        """Choose the waiting request to admit next; nobody else is admitted before it.

        Asked again after each admission, and in every step.

        Args:
            waiting: at least one request; those that were preempted are back among them.
        """
        ...

    def victim(self, running: Sequence[Request]) -> Request:
        """Choose whom to preempt, because another one lacks a block; it may be that one itself.

        Args:
            running: those that may be, at least one, in order of arrival.
        """
        ...

    def charge(self, request: Request, num_computed: int, num_sampled: int) -> None:
        """Take note of what a step has done for a request, once its tokens are committed.

        Args:
            num_computed: tokens whose keys and values were computed, again where it had been preempted.
            num_sampled: tokens that it got.
        """
        ...

"""Groups by the cached share of a prompt, each served in proportion to its priority."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from hpu_duo.request import Request
from hpu_duo.scheduling.cache_aware import WINDOW, CacheAware
from hpu_duo.scheduling.policy import Waiting


class CachedShareGroups(CacheAware):
    """Requests of which more is cached are admitted more often, and none waits for ever.

    Requests of which the ``g``-th part of ``groups`` equal parts is cached are group ``g``, from 0. While all
    groups have requests waiting, group ``g`` gets ``g + 1`` of each ``groups * (groups + 1) / 2`` admissions,
    spread evenly; within a group the earliest is first. A group in which nobody waits saves up nothing.

    A request changes groups when the cache does. The earliest waiting one is always the first of its group,
    so it is overtaken at most ``groups * (groups + 3) / 2`` times while it stays there.

    Args:
        groups: 1 or more; 1 is ``fcfs``.
        window: earliest requests that are looked up in a step; 1 or more.

    Source: the local scheduler of Preble, Srivatsa et al. 2024 (arXiv:2407.00023). The proportions are kept
    by stride scheduling, Waldspurger and Weihl 1995.
    """

    def __init__(self, groups: int = 10, window: int = WINDOW) -> None:
        super().__init__(window, patience=inf)
        if groups < 1:
            raise ValueError(f"expected groups of scheduling_policy 'preble' to be 1 or more, got {groups}")
        # Of each group: admissions divided by its priority, on a clock that all groups share.
        self._served = [0.0] * groups
        self._clock = 0.0

    def order(self, requests: Sequence[Request], waiting: Waiting) -> list[Request]:
        """Return the requests as they would be admitted if no other came."""
        queues: dict[int, deque[Request]] = {}
        for request in requests:
            group = self._group(request, waiting.num_cached_tokens(request))
            queues.setdefault(group, deque()).append(request)
        served = {group: max(self._served[group], self._clock) for group in queues}
        ordered = []
        while queues:
            group = min(queues, key=lambda each: (served[each], -each))
            ordered.append(queues[group].popleft())
            served[group] += 1 / (group + 1)
            if not queues[group]:
                del queues[group]
        return ordered

    def admitted(self, request: Request) -> None:
        """Count the admission for the group of the request."""
        group = self._group(request, request.num_computed_tokens)
        self._clock = max(self._served[group], self._clock)
        self._served[group] = self._clock + 1 / (group + 1)

    def _group(self, request: Request, num_cached: int) -> int:
        return min(num_cached * len(self._served) // request.num_tokens, len(self._served) - 1)

"""Policies that order requests by their cached prefixes."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice
from math import inf
from typing import Any

from hpu_duo.request import Request, RequestStatus
from hpu_duo.scheduling.policy import SchedulingPolicy, Waiting
from hpu_duo.scheduling.ranked import PATIENCE

WINDOW = 128
"""Requests that are looked up in the prefix cache in one step, the earliest ones."""


class CacheAware(SchedulingPolicy):
    """Orders the earliest waiting requests by what is cached of them, anew in every step.

    Requests with a cached prefix are admitted before those without, as long as such requests arrive. The
    earliest waiting request is overtaken ``patience`` times at most; see ``RankedPolicy``.

    Args:
        window: earliest requests that are ordered; 1 or more.
        patience: infinite = requests that share nothing may wait for ever.
    """

    def __init__(self, window: int = WINDOW, patience: float = PATIENCE) -> None:
        if window < 1 or not patience >= 0:
            raise ValueError(
                f"expected window to be 1 or more and patience 0 or more, got {window} and {patience}"
            )
        self._window, self._patience = window, patience
        # Of this step; requests before the index are admitted or skipped.
        self._order: list[Request] = []
        self._place = 0

    @abstractmethod
    def order(self, requests: Sequence[Request], waiting: Waiting) -> list[Request]:
        """Return the requests, which come in order of arrival, in the order to admit them."""

    def begin_step(self) -> None:
        """Recompute the order at the next admission: the cache may have changed."""
        self._order, self._place = [], 0

    def queued(self, request: Request) -> None:
        """Restart at the beginning of the order: the request may have been removed from it."""
        self._place = 0

    def next(self, waiting: Waiting) -> Request:
        """Return the first one that is left, or the earliest if arrivals were overtaken too often."""
        if waiting.num_overtakes >= self._patience:
            return waiting.first
        found = self._first(waiting)
        if found is None:
            self._order, self._place = self.order(list(islice(waiting, self._window)), waiting), 0
            found = self._first(waiting)
        assert found is not None, f"none of {len(self._order)} requests waits"
        return found

    def _first(self, waiting: Waiting) -> Request | None:
        while self._place < len(self._order):
            request = self._order[self._place]
            if request.status is RequestStatus.WAITING and waiting.is_offered(request):
                return request
            self._place += 1
        return None


class LongestPrefixMatch(CacheAware):
    """Requests of which most is cached are admitted first, then by arrival.

    Source: RadixAttention, Zheng et al. 2024 (arXiv:2312.07104), with a bound on how long others wait.
    """

    def order(self, requests: Sequence[Request], waiting: Waiting) -> list[Request]:
        """Return the requests by cached tokens."""
        return sorted(requests, key=lambda each: (-waiting.num_cached_tokens(each), each.arrival))


class DepthFirst(CacheAware):
    """Traverses the tree of cached prefixes depth first, branches with most waiting requests first.

    So requests under one prefix are admitted together, before it is evicted.

    Source: the policy ``dfs-weight`` of SGLang.
    """

    def order(self, requests: Sequence[Request], waiting: Waiting) -> list[Request]:
        """Return the requests in the order of the traversal; those that end at a node follow its branches."""
        paths = [_usable_path(request, waiting) for request in requests]
        weights: Counter[Any] = Counter(node for path in paths for node in path)
        numbers = {node: number for number, node in enumerate(weights)}
        keys = [
            (*((-weights[node], numbers[node]) for node in path), (1, request.arrival))
            for path, request in zip(paths, requests)
        ]
        return [requests[place] for place in sorted(range(len(requests)), key=keys.__getitem__)]


def _usable_path(request: Request, waiting: Waiting) -> Sequence[Any]:
    found = waiting.find(request)
    return () if found is None else found.path[: found.num_usable]


class CachedShareGroups(CacheAware):
    """Requests of which more is cached are admitted more often, and none waits for ever.

    Requests of which the ``g``-th part of ``groups`` equal parts is cached are group ``g``, from 0. While all
    groups have requests waiting, group ``g`` gets ``g + 1`` of each ``groups * (groups + 1) / 2`` admissions,
    spread evenly; within a group the earliest is first. An empty group accumulates no credit.

    A request changes groups when the cache does. The earliest waiting one is always the first of its group,
    so it is overtaken at most ``groups * (groups + 3) / 2`` times while it stays there.

    Args:
        groups: 1 or more; 1 is ``fcfs``.
        window: earliest requests that are looked up in a step; 1 or more.

    Source: the local scheduler of Preble, Srivatsa et al. 2024 (arXiv:2407.00023). The proportions are those
    of stride scheduling, Waldspurger and Weihl 1995.
    """

    def __init__(self, groups: int = 10, window: int = WINDOW) -> None:
        super().__init__(window, patience=inf)
        if groups < 1:
            raise ValueError(f"expected groups of scheduling_policy 'preble' to be 1 or more, got {groups}")
        # Of each group: admissions divided by its priority, on a clock that all groups share.
        self._served = [0.0] * groups
        self._clock = 0.0

    def order(self, requests: Sequence[Request], waiting: Waiting) -> list[Request]:
        """Return the requests in order of admission without new arrivals."""
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

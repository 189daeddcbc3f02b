"""Prefixes whose requests wait longer and longer."""

from __future__ import annotations

from hpu_duo.routing.radix_tree import RadixNode
from hpu_duo.routing.window_sums import WindowSums


class HotPrefixes:
    """Times to the first token of the requests of each prefix, which show that it needs more replicas.

    Args:
        window_s: seconds for which times are remembered.
        growth: a prefix is hot when the mean of the later half is so many times that of the earlier half.
        num_least: times that it takes to tell.
    """

    def __init__(self, window_s: float, growth: float, num_least: int = 16) -> None:
        self._window_s, self._growth, self._num_least = window_s, growth, num_least

    def add(self, node: RadixNode, now: float, ttft: float) -> None:
        """Note the time to the first token of a request."""
        if node.first_tokens is None:
            node.first_tokens = WindowSums()
        node.first_tokens.drop(now - self._window_s)
        node.first_tokens.add(now, ttft)

    def take(self, node: RadixNode, now: float) -> bool:
        """Return whether a prefix is hot; if it is, it has to become so anew to be hot again."""
        times = node.first_tokens
        if times is None:
            return False
        times.drop(now - self._window_s)
        if times.num() < self._num_least:
            return False
        half = len(times) // 2
        is_hot = _mean(times[half:]) >= self._growth * _mean(times[:half]) > 0
        if is_hot:
            node.first_tokens = None
        return is_hot


def _mean(groups: list[tuple[float, int, float]]) -> float:
    num = sum(each[1] for each in groups)
    return sum(each[2] for each in groups) / num if num else 0.0

"""Replicas by turns."""

from __future__ import annotations

from collections.abc import Sequence

from hpu_duo.routing.request import Dispatch, RoutedRequest
from hpu_duo.routing.router import Router


class RoundRobin(Router):
    """Sends each request to the replica that was sent one the longest ago."""

    def __init__(self) -> None:
        super().__init__()
        self._num_sent = 0
        self._turns: dict[str, int] = {}

    def _pick(self, request: RoutedRequest, offered: Sequence[str], now: float) -> str:
        return min(offered, key=self._turns.__getitem__)

    def _joins(self, replica: str, now: float) -> None:
        self._turns[replica] = 0

    def _leaves(self, replica: str) -> None:
        del self._turns[replica]

    def _begins(self, sent: Dispatch) -> None:
        self._num_sent += 1
        self._turns[sent.replica] = self._num_sent

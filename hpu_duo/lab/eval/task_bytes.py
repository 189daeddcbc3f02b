"""KV bytes of many tasks that are evaluated side by side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpu_duo.lab.eval.kv_bytes import KVBytes


class KVByTask:
    """Bytes kept in the cache for the requests of each task that have run.

    Requests that the harness answers from its own cache do not run.
    """

    def __init__(self) -> None:
        self._of: dict[str, KVBytes] = {}

    def add(self, tasks: Iterable[str | None], kv: Iterable[KVBytes]) -> None:
        """Add the bytes of requests, each with the name of its task."""
        for task, one in zip(tasks, kv, strict=True):
            name = task or "no task"
            self._of[name] = KVBytes.total([self._of[name], one]) if name in self._of else one

    def rows(self) -> list[dict[str, Any]]:
        """One row per task: requests, and means of tokens and bytes."""
        return [
            {"task": task, "num_requests": kv.num_texts, **kv.report_fields} for task, kv in self._of.items()
        ]

"""Tokens and bytes in the cache at the ends of texts, of one task or of many side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_RECORDED = ("kv_num_tokens", "held_bytes", "full_bytes", "kv_num_texts")


@dataclass(frozen=True)
class KVBytes:
    """Tokens and bytes in the cache at the ends of texts, as sums over the texts.

    Attributes:
        num_tokens: tokens of the texts, answers included, in the cache.
        held: bytes of the blocks and ring rows that the engine allocates for them, each text alone.
        full: bytes that they take when every head keeps all of them, unrounded.
        num_texts: one or more.
    """

    num_tokens: int
    held: int
    full: int
    num_texts: int = 1

    @classmethod
    def total(cls, parts: Iterable[KVBytes]) -> KVBytes:
        """Add up several sums."""
        counts = [(one.num_tokens, one.held, one.full, one.num_texts) for one in parts]
        return cls(*map(sum, zip(*counts, strict=True)))

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> KVBytes:
        """Read the sums from a line of results, as ``record_fields`` has written them."""
        return cls(*(record[name] for name in _RECORDED))

    @property
    def ratio(self) -> float:
        """Bytes kept / bytes of the full cache."""
        return self.held / self.full if self.full else 0.0

    @property
    def record_fields(self) -> dict[str, int]:
        """The sums, for a line of results."""
        return dict(zip(_RECORDED, (self.num_tokens, self.held, self.full, self.num_texts), strict=True))

    @property
    def report_fields(self) -> dict[str, float]:
        """Means over the texts, for a row of a report: tokens, bytes kept, bytes of the full cache; ratio."""
        return {
            "kv_num_tokens": self.num_tokens / self.num_texts,
            "held_bytes": self.held / self.num_texts,
            "full_bytes": self.full / self.num_texts,
            "kv_ratio": self.ratio,
        }


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

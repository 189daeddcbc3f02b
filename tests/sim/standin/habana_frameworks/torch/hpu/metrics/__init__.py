"""Stand-in of ``habana_frameworks.torch.hpu.metrics``: lists of pairs, under the vendor's names."""

from __future__ import annotations

from collections import Counter
from typing import Any

_COMPILATION_US = 1500
_fallbacks: Counter[str] = Counter()
_num_compiled = [0]


def compiled() -> None:
    """Tests and the other stand-ins: a graph was compiled."""
    _num_compiled[0] += 1


def fell_back(operator: str) -> None:
    """Tests: an operator ran on the CPU of the host."""
    _fallbacks[operator] += 1


class _Metric:
    def __init__(self, name: str) -> None:
        self._name = name

    def stats(self) -> list[tuple[str, Any]]:
        """Counts since the process began."""
        if self._name == "graph_compilation":
            total = _num_compiled[0]
            average = _COMPILATION_US if total else 0
            return [("TotalNumber", total), ("TotalTime", total * _COMPILATION_US), ("AvgTime", average)]
        return [("TotalNumber", _fallbacks.total()), ("FallbackOps", dict(_fallbacks))]


def metric_global(name: str) -> _Metric:
    """A metric of the whole process."""
    if name not in ("graph_compilation", "cpu_fallback", "memory_defragmentation"):
        raise ValueError(f"metric {name} not found")
    return _Metric(name)

"""A device graph on any device: the operators of a run, recorded and replayed on the same tensors.

Unlike ``graphs.backends.replay``, whose replay makes new tensors in each run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.backends.base import Outputs, Recording

_ATEN = torch.ops.aten
READS = (_ATEN.item.default, _ATEN._local_scalar_dense.default, _ATEN.equal.default)


class OperatorGraph(TorchDispatchMode):
    """Records operators while it is entered; ``replay`` runs them without the Python around them.

    Args:
        launches: whether operators take effect while they are recorded. If not, writes are left out
            and new tensors hold zeros, as memory does in which nothing has been computed.
    """

    def __init__(self, launches: bool) -> None:
        super().__init__()
        self._launches = launches
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            # Some are views or copies as it happens; what they are made of is one or the other.
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if func in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        if self._launches or not func._schema.is_mutable:
            result = func(*args, **kwargs)
            if not self._launches and not is_view(func):
                clear(result)
        else:
            result = args[0]
        self._calls.append((func, args, kwargs, result))
        return result

    def replay(self) -> None:
        """Run the operators again; each result goes to where it went the first time."""
        for func, args, kwargs, result in self._calls:
            if not is_view(func):
                put(result, func(*args, **kwargs))


def is_view(func: Any) -> bool:
    return not func._schema.is_mutable and any(each.alias_info for each in func._schema.returns)


def clear(result: Any) -> None:
    for each in result if isinstance(result, tuple | list) else [result]:
        each.zero_()


def put(old: Any, new: Any) -> None:
    if isinstance(old, tuple | list):
        for old_item, new_item in zip(old, new, strict=True):
            put(old_item, new_item)
    elif old is not new:
        old.copy_(new)


class OperatorRecorder:
    """A ``CudaRecorder`` for the CPU: one real run, then a recording that launches nothing."""

    def problem(self, device: torch.device) -> str | None:
        return None if device.type == "cpu" else f"expected device 'cpu', got {device}"

    def record(self, run: Callable[[], Outputs]) -> Recording[Outputs]:
        first = run()
        graph = OperatorGraph(launches=False)
        with graph:
            static = run()
        return Recording(first, static, graph.replay)

"""Stand-in of ``habana_frameworks.torch.hpu.graphs``: what keys a graph, and what a replay does to results.

From the bridge's public source: a graph belongs to a hash of all arguments. Tensors enter with shape and
strides, without their dtype; lists, tuples and dicts enter item by item; anything else enters with its
own hash, so an unhashable argument is a TypeError and every new number is a new graph. Only hashes are
compared. Results are the graph's own tensors, which its next replay overwrites. In compile-only mode
nothing is launched, so results are garbage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from habana_frameworks.torch.calls import CALLS
from habana_frameworks.torch.hpu.metrics import compiled
from habana_frameworks.torch.internal.bridge_config import SETTINGS
from tests.graphs.operator_graph import OperatorGraph

GARBAGE = float("nan")


class HPUGraph:
    """Operators between ``capture_begin`` and ``capture_end``, which run, and run again at each replay.

    In compile-only mode they are compiled and not run. Lazy mode counts what was collected before the
    capture, and was not launched by a ``mark_step``, as part of the graph.
    """

    def __init__(self) -> None:
        self._graph: OperatorGraph | None = None

    def capture_begin(self, dry_run: bool = False) -> None:
        """Operators belong to the graph from here on."""
        assert self._graph is None, "a graph is captured once"
        if not CALLS["mark_step"]:
            raise RuntimeError("the graph would begin with what was collected before it")
        is_launched = not (dry_run or SETTINGS.get("PT_COMPILE_ONLY_MODE"))
        self._graph = OperatorGraph(launches=is_launched)
        self._graph.__enter__()

    def capture_end(self) -> None:
        """Operators do not belong to the graph any more."""
        assert self._graph is not None, "nothing is captured"
        self._graph.__exit__(None, None, None)
        CALLS["capture"] += 1
        compiled()

    def replay(self, asynchronous: bool = False) -> None:
        """Run the graph's operators."""
        assert self._graph is not None, "nothing was captured"
        CALLS["replay"] += 1
        if not SETTINGS.get("PT_COMPILE_ONLY_MODE"):
            self._graph.replay()


def input_hash(value: Any) -> int:
    """The key of a graph."""
    if isinstance(value, torch.Tensor):
        return hash((tuple(value.shape), value.stride(), value.storage_offset()))
    if isinstance(value, dict):
        return input_hash(tuple(value.items()))
    if isinstance(value, list | tuple):
        return hash(tuple(input_hash(item) for item in value))
    return hash(value)


def wrap_in_hpu_graph(
    module: nn.Module,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
    max_graphs: int | None = None,
) -> nn.Module:
    """Replace ``module.forward`` by one that captures a graph for each new key."""
    graphs: dict[int, Any] = {}
    original: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        is_warm_up = kwargs.pop("warmup_mode", False)
        if kwargs.pop("bypass_hpu_graphs", False):
            CALLS["bypass"] += 1
            return original(*args, **kwargs)
        key = input_hash((args, kwargs))
        kwargs.pop("cache_tensors_list", None)
        if key in graphs:
            if not is_warm_up:
                CALLS["replay"] += 1
                _overwrite(graphs[key], _launch(original, args, kwargs))
            return graphs[key]
        if max_graphs is not None and len(graphs) == max_graphs:
            CALLS["plain"] += 1
            return original(*args, **kwargs)
        CALLS["capture"] += 1
        compiled()
        graphs[key] = _launch(original, args, kwargs)
        return graphs[key]

    module.forward = forward
    vars(module).update(clear_cache=graphs.clear, clear_inputs=lambda: None)
    return module


def _launch(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = original(*args, **kwargs)
    if SETTINGS.get("PT_COMPILE_ONLY_MODE"):
        _overwrite(result, None)
    return result


def _overwrite(static: Any, new: Any) -> None:
    if isinstance(static, torch.Tensor):
        if new is None:
            static.fill_(GARBAGE)
        else:
            static.copy_(new)
    elif isinstance(static, list | tuple):
        for index, item in enumerate(static):
            _overwrite(item, None if new is None else new[index])

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
from habana_frameworks.torch.internal.bridge_config import SETTINGS

GARBAGE = float("nan")


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

"""Tables that a model fills at their first use, and a check that nothing has changed them.

A rotary embedding may keep its cosines, or the frequencies of long texts, once a step has needed them. If
such a table is filled while a device compiles and launches nothing, it holds garbage, which every later
step reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hpu_duo.modeling.attention import AttentionLayer
from hpu_duo.modeling.packed_linear import PackedLinear, PanelLinear

Digests = Mapping[str, str]


def digest_tables(model: nn.Module) -> Digests:
    """Return a digest of each tensor of a model that is neither weight nor KV store, by its path."""
    return {name: _digest(tensor) for name, tensor in _tables(model)}


def check_unchanged(before: Digests, after: Digests) -> None:
    """Refuse tables that were made or changed between two digests.

    Raises:
        RuntimeError: a table was; the message names it.
    """
    touched = sorted(name for name in after if before.get(name) != after[name])
    if touched:
        raise RuntimeError(
            f"{', '.join(touched)}: filled or changed while nothing was launched, so what they hold is "
            "garbage, and so is this model's output from now on; load it again, and warm up without "
            "compile_only"
        )


def _tables(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        # Stores change in every step, and packed weights never do.
        if isinstance(module, AttentionLayer | PackedLinear | PanelLinear):
            continue
        own = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
        held = {**dict(module.named_buffers(recurse=False, remove_duplicate=False)), **own}
        for name, value in held.items():
            yield from _tensors(f"{path}.{name}" if path else name, value)


_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has, its parameters, buffers and children among them."""


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(f"{name}[{index}]", item)


def _digest(tensor: torch.Tensor) -> str:
    host = tensor.detach().cpu().contiguous().flatten()
    content = host.view(torch.uint8).numpy().tobytes() if host.numel() else b""
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()}"

"""Positions that every head stores of a running request, by the model's own head numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import nn

from hpu_duo.heads.permute import ORDER_ATTRIBUTE
from hpu_duo.kv.store import KVStore
from hpu_duo.request import RequestStatus
from kernels_ref import Budget, GroupKind, Rings

if TYPE_CHECKING:
    from hpu_duo.engine.engine import Engine


def kept_positions(
    store: KVStore, row: int, num_tokens: int
) -> tuple[tuple[npt.NDArray[np.int32], ...], ...]:
    """Return the positions that each head with a budget stores of a row, ascending, layer by layer.

    Heads are in the order of their group; a layer without a budget has none. Synchronizes with the device.

    Args:
        num_tokens: tokens of the row that are in the cache.
    """
    found = []
    for layer, cache in zip(store.plan.layers, store.layers):
        heads: list[npt.NDArray[np.int32]] = []
        for group, units in zip(layer.groups, cache):
            if isinstance(group.kind, Budget) and units.state is not None:
                versions = group.kind.versions
                shape = versions, group.num_heads, units.layout.num_slots
                lines = units.state.position[row].cpu().numpy().reshape(shape)[(num_tokens - 1) % versions]
                # With one version occupied slots come first, else free ones have negative positions.
                heads += [np.sort(line[:num_tokens] if versions == 1 else line[line >= 0]) for line in lines]
        found.append(tuple(heads))
    return tuple(found)


@dataclass(frozen=True)
class KeptByHead:
    """Tokens that one KV head stores of a request.

    Attributes:
        kind: description of the head's kind.
        positions: ascending, int32 ``[tokens kept]``.
    """

    kind: str
    positions: npt.NDArray[np.int32]


@dataclass(frozen=True)
class KeptTokens:
    """Tokens that all KV heads store of a request.

    Attributes:
        num_tokens: computed tokens of the request.
        layers: by layer and KV head, both in the model's order.
    """

    num_tokens: int
    layers: tuple[tuple[KeptByHead, ...], ...]


def num_computed(engine: Engine, request_id: str, sample_index: int = 0) -> int | None:
    """Return the number of computed tokens of a running request; None if it does not run."""
    with engine.exclusive():
        request = engine.scheduler.get(f"{request_id}#{sample_index}")
        is_running = request is not None and request.status is RequestStatus.RUNNING
        return request.num_computed_tokens if request is not None and is_running else None


def kept_tokens(engine: Engine, request_id: str, sample_index: int = 0) -> KeptTokens:
    """Return the positions that each KV head stores of a running request. Synchronizes with the device.

    Heads with a budget store the tokens that their policy chose, those with a ring the sinks and the newest
    tokens of its window, others all tokens.

    Raises:
        ValueError: no such request runs, or several ranks share the heads.
    """
    with engine.exclusive():
        request = engine.scheduler.get(f"{request_id}#{sample_index}")
        if request is None or request.status is not RequestStatus.RUNNING:
            raise ValueError(f"expected the id of a running request, got {request_id!r}")
        if engine.runner.executor.followers is not None:
            raise ValueError("expected a model of one rank, got heads that are sharded over ranks")
        num_tokens, store = request.num_computed_tokens, engine.runner.store
        chosen = kept_positions(store, request.row, num_tokens)
        orders = _orders(engine.runner.model.model)
        layers = []
        for number, (layer, of_layer) in enumerate(zip(store.plan.layers, chosen)):
            budgets = iter(of_layer)
            stored = [
                _kept(group.kind, num_tokens, budgets)
                for group in layer.groups
                for _ in range(group.num_heads)
            ]
            order = orders.get(number, range(len(stored)))
            layers.append(tuple(stored[place] for place in np.argsort(np.array(order)).tolist()))
        return KeptTokens(num_tokens, tuple(layers))


def _kept(kind: GroupKind, num_tokens: int, chosen: Iterator[npt.NDArray[np.int32]]) -> KeptByHead:
    """Return the positions of the next head of a group; ``chosen`` has those of heads with a budget."""
    every = np.arange(num_tokens, dtype=np.int32)
    match kind:
        case Budget():
            return KeptByHead(kind.describe(), next(chosen))
        case Rings():
            seen = np.asarray(kind.window.sees(num_tokens - 1, every), dtype=bool)
            return KeptByHead(kind.describe(), every[seen])
        case _:
            return KeptByHead(kind.describe(), every)


def _orders(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """Original head numbers in the new order, by layer whose heads are reordered."""
    return {
        int(vars(module)["layer_idx"]): getattr(module, ORDER_ATTRIBUTE)
        for module in model.modules()
        if hasattr(module, ORDER_ATTRIBUTE)
    }


def positions_of(
    engine: Engine, request_id: str, sample_index: int = 0
) -> tuple[tuple[npt.NDArray[np.int32], ...], ...]:
    """Return the positions that each head with a KV budget stores of a running request, layer by layer.

    Ascending; those of a layer are in the order of its heads that have a budget, kind after kind. With
    several ranks, those of rank 0. Synchronizes with the device.

    Raises:
        ValueError: no such request runs, or no head has a budget.
    """
    with engine.exclusive():
        request = engine.scheduler.get(f"{request_id}#{sample_index}")
        if request is None or request.status is not RequestStatus.RUNNING:
            raise ValueError(f"expected the id of a running request, got {request_id!r}")
        layers = engine.runner.store.plan.layers
        if not any(isinstance(group.kind, Budget) for layer in layers for group in layer.groups):
            raise ValueError("expected a model with kv_policy, got one whose heads have no budget")
        return kept_positions(engine.runner.store, request.row, request.num_computed_tokens)

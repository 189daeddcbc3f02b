"""States of running requests besides blocks, a row each: what is copied, saved and counted by rows.

Snapshots are rows with the states at the end of cached prefixes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from hpu_duo.kv.prefix_tree import PrefixNode, PrefixTree
from kernels_ref import HeadGroup, KVUnits, RowKind, UnitLayout
from kernels_ref.units import gather, index_dtype, unit_places, write


class UnitCopies:
    """Copies of units, or of rows, within stores; every source is read before anything is written.

    Args:
        copies: int32 ``[2, n]``, on the device: sources, and the destinations below them.
    """

    def __init__(self, copies: torch.Tensor) -> None:
        self.source, self.target = copies.unbind()
        self._places: dict[UnitLayout, torch.Tensor] = {}

    def copy_units(self, units: KVUnits) -> None:
        """Copy units of a store of keys and of one of values, with what is known of their slots."""
        layout = units.layout
        if layout not in self._places:
            self._places[layout] = unit_places(self.target, layout)
        for flat, unit in ((units.k_flat, units.k), (units.v_flat, units.v)):
            write(flat, self._places[layout], gather(unit, self.source))
        for each in units.state or ():
            self.copy_entries(each)

    def copy_entries(self, tensor: torch.Tensor) -> None:
        """Copy entries of dimension 0 of a tensor."""
        target = self.target.to(index_dtype(self.target.device))
        tensor.index_copy_(0, target, gather(tensor, self.source))


class SavedTensor(NamedTuple):
    """A tensor of a snapshot on the host.

    Attributes:
        shape: of one row.
        dtype: of the elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


class RowState(ABC):
    """A state that every running request has in one layer: rows of some tensors, the null row last.

    The rows of snapshots of the prefix cache lie behind those of requests, so a snapshot on the device is a
    copy of a row; ``snapshot`` and ``restore`` move rows to the host and back.

    Attributes:
        name: distinct in a model; names of its tensors begin with it.
        kind: description of a row, for fingerprints.
    """

    name: str
    kind: str

    @property
    @abstractmethod
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors, on the device."""

    @property
    @abstractmethod
    def saved(self) -> Mapping[str, SavedTensor]:
        """Tensors of a snapshot by name."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return sum(each.num_bytes for each in self.saved.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows, the null row included."""
        return sum(each.nbytes for each in self.tensors)

    @abstractmethod
    def copy(self, rows: UnitCopies) -> None:
        """Copy rows within the tensors."""

    @abstractmethod
    def snapshot(self, row: int, num_tokens: int) -> dict[str, torch.Tensor]:
        """Copy a row to the host; what its request does not see behind ``num_tokens`` tokens is zeros."""

    @abstractmethod
    def restore(self, row: int, saved: Mapping[str, torch.Tensor]) -> None:
        """Fill a row with what ``snapshot`` returned, of this state or of one of the same kind."""


class HeadRows(RowState):
    """Keys and values that heads store of a request: a ring, or the slots of a KV budget with their state.

    Args:
        name: of the group in the model.
        group: the heads.
        units: the store of the group in the layer.
    """

    def __init__(self, name: str, group: HeadGroup, units: KVUnits) -> None:
        self.name, self._group, self._units = name, group, units
        self.kind = f"{group.kind.name} {group.kind.describe()}".strip()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Keys, values, and positions and scores of slots where the kind has them."""
        return self._units.k_flat, self._units.v_flat, *(self._units.state or ())

    @property
    def _views(self) -> dict[str, torch.Tensor]:
        """Tensors ``[R + 1, ...]`` by name."""
        views = {f"{self.name}.keys": self._units.k, f"{self.name}.values": self._units.v}
        if self._units.state is not None:
            for field, tensor in self._units.state._asdict().items():
                views[f"{self.name}.{field}"] = tensor
        return views

    @property
    def saved(self) -> dict[str, SavedTensor]:
        """Tensors of a snapshot by name: keys and values ``[K, S, D]``."""
        return {name: SavedTensor(tuple(view.shape[1:]), view.dtype) for name, view in self._views.items()}

    def copy(self, rows: UnitCopies) -> None:
        """Copy rows within the store."""
        rows.copy_units(self._units)

    @torch.inference_mode()
    def snapshot(self, row: int, num_tokens: int) -> dict[str, torch.Tensor]:
        """Copy a row to the host; slots that are not seen behind ``num_tokens`` tokens are zeros."""
        layout = self._units.layout
        seen = self._group.kind.seen_slots(num_tokens, layout.num_slots)
        found = {}
        for name, view in self._views.items():
            data = view[row].cpu()
            # Positions and scores have the slots of all heads side by side.
            mask = seen[:, None] if data.ndim > 1 else seen.repeat(layout.num_heads)
            found[name] = torch.where(mask, data, torch.zeros((), dtype=data.dtype))
        return found

    @torch.inference_mode()
    def restore(self, row: int, saved: Mapping[str, torch.Tensor]) -> None:
        """Fill a row with a snapshot."""
        for name, view in self._views.items():
            view[row].copy_(saved[name])


class KindRows(RowState):
    """The state of a ``RowKind``.

    Args:
        name: of the layer in the model.
        kind: of the state.
        tensors: those of the kind for all rows, ``[R + 1, ...]``.
    """

    def __init__(self, name: str, kind: RowKind, tensors: tuple[torch.Tensor, ...]) -> None:
        self.name, self.kind = f"{name}.{kind.name}", kind.name
        self._tensors = {f"{self.name}.{each.name}": tensor for each, tensor in zip(kind.tensors, tensors)}

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors ``[R + 1, ...]``, in the order of the kind."""
        return tuple(self._tensors.values())

    @property
    def saved(self) -> dict[str, SavedTensor]:
        """Tensors of a snapshot by name."""
        return {name: SavedTensor(tuple(each.shape[1:]), each.dtype) for name, each in self._tensors.items()}

    def copy(self, rows: UnitCopies) -> None:
        """Copy rows within the tensors."""
        for each in self._tensors.values():
            rows.copy_entries(each)

    @torch.inference_mode()
    def snapshot(self, row: int, num_tokens: int) -> dict[str, torch.Tensor]:
        """Copy a whole row to the host, in the state after its last token."""
        return {name: each[row].to("cpu", copy=True) for name, each in self._tensors.items()}

    @torch.inference_mode()
    def restore(self, row: int, saved: Mapping[str, torch.Tensor]) -> None:
        """Fill a row with a snapshot."""
        for name, each in self._tensors.items():
            each[row].copy_(saved[name])


_SHARE = 8
"""Snapshots use at most one byte for this number of bytes of the other stores."""


def default_snapshots(other_bytes: int, row_bytes: int, max_num_seqs: int) -> int:
    """Return the default number of snapshots: as many as requests run, within a share of memory.

    At least one, without which no prefix can be reused.

    Args:
        other_bytes: of all other stores.
        row_bytes: of one snapshot; 0 if no head has a ring, so that snapshots are not needed.
        max_num_seqs: requests that run at the same time.
    """
    if not row_bytes:
        return 0
    return min(max_num_seqs, max(1, other_bytes // _SHARE // row_bytes))


def default_snapshots_within(kv_bytes: int, row_bytes: int, max_num_seqs: int) -> int:
    """The same for stores that have ``kv_bytes`` together with the snapshots."""
    return default_snapshots(kv_bytes * _SHARE // (_SHARE + 1), row_bytes, max_num_seqs)


class Snapshots:
    """Allocates the rows of snapshots; if none is free, the least valuable snapshot is evicted.

    The value of a snapshot is the number of tokens that it saves, those between it and the next shorter one,
    divided by the time since its last use. All snapshots have the same size. Half of the rows are reserved
    for prefixes that were requested again: most texts occur once, however long they are.

    Args:
        rows: ids of the rows, after those of running requests.
    """

    def __init__(self, rows: range) -> None:
        self._rows = rows
        self._free = list(reversed(rows))
        self._nodes: dict[int, PrefixNode] = {}

    @property
    def num_rows(self) -> int:
        """Number of rows for snapshots."""
        return len(self._rows)

    @property
    def num_used(self) -> int:
        """Number of snapshots in use."""
        return len(self._nodes)

    @property
    def nodes(self) -> tuple[PrefixNode, ...]:
        """Prefixes with a snapshot."""
        return tuple(self._nodes.values())

    def has_place(self, is_held: Callable[[PrefixNode], bool]) -> bool:
        """Whether ``place`` would allocate a row to a prefix."""
        return bool(self._free) or any(not is_held(each) for each in self._nodes.values())

    def place(
        self, node: PrefixNode, tree: PrefixTree, is_held: Callable[[PrefixNode], bool]
    ) -> PrefixNode | None:
        """Allocate a row to a prefix, which the caller fills, unless all rows belong to pinned prefixes.

        Returns:
            The prefix whose snapshot was evicted, if any.
        """
        lost = None
        if not self._free:
            others = [each for each in self._nodes.values() if not is_held(each)]
            if not others:
                return None
            lost = self._least_valuable(others, tree.time)
            self.remove(lost)
        node.snapshot = self._free.pop()
        self._nodes[node.snapshot] = node
        return lost

    def _least_valuable(self, nodes: list[PrefixNode], now: int) -> PrefixNode:
        nodes = sorted(nodes, key=lambda each: _value(each, now))
        shared = [each for each in nodes if each.is_shared]
        kept = {*shared[-(len(self._rows) // 2) :]} if len(self._rows) > 1 else {*()}
        return next((each for each in nodes if each not in kept), nodes[0])

    def remove(self, node: PrefixNode) -> None:
        """Free the row of a prefix, if it has one."""
        if node.snapshot is not None:
            del self._nodes[node.snapshot]
            self._free.append(node.snapshot)
            node.snapshot = None


def _value(node: PrefixNode, now: int) -> float:
    shorter = (each.depth for each in node.path if each.snapshot is not None and each is not node)
    return (node.depth - next(shorter, 0)) / (1 + now - node.last_used)

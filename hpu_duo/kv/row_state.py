"""States of running requests besides blocks, a row each: what is copied, saved and counted by rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch

from kernels_ref import HeadGroup, KVUnits, RowKind, UnitLayout
from kernels_ref.groups.budget_versions import FREE
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
        """Copy units in all tensors of a store, with what is known of their slots."""
        layout = units.layout
        if layout not in self._places:
            self._places[layout] = unit_places(self.target, layout)
        for flat, unit in zip(units.tensors, units.views):
            write(flat, self._places[layout], gather(unit, self.source))
        for each in units.state or ():
            self.copy_entries(each)

    def copy_entries(self, tensor: torch.Tensor) -> None:
        """Copy entries of dimension 0 of a tensor."""
        target = self.target.to(index_dtype(self.target.device))
        tensor.index_copy_(0, target, gather(tensor, self.source))


class Units(NamedTuple):
    """A tensor of a store, and the units in it.

    Attributes:
        tensor: a list of vectors, ``[V, D]``, or without a layout units ``[X, ...]``.
        layout: of the units in the list.
    """

    tensor: torch.Tensor
    layout: UnitLayout | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a unit."""
        layout = self.layout
        if layout is None:
            return tuple(self.tensor.shape[1:])
        return layout.num_heads, layout.num_slots, self.tensor.shape[-1]

    @property
    def null_unit(self) -> int:
        """The last unit, which nobody has."""
        return (len(self.tensor) if self.layout is None else self.layout.num_units) - 1

    def read(self, units: torch.Tensor) -> torch.Tensor:
        """Copies of units, ``[n, ...]``.

        Args:
            units: their ids, on the device.
        """
        view = self.tensor if self.layout is None else self.layout.views((self.tensor,))[0]
        return gather(view, units)

    def write(self, units: torch.Tensor, data: torch.Tensor) -> None:
        """Fill units with ``[n, ...]``."""
        if self.layout is None:
            self.tensor.index_copy_(0, units.to(index_dtype(units.device)), data)
        else:
            write(self.tensor, unit_places(units, self.layout), data)


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
    def units(self) -> tuple[Units, ...]:
        """All tensors, with the rows in each."""

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
        """Those of keys and values, and positions and scores of slots where the kind has them."""
        return *self._units.tensors, *(self._units.state or ())

    @property
    def units(self) -> tuple[Units, ...]:
        """Those of keys and values, and of slots."""
        layout, state = self._units.layout, self._units.state or ()
        return *(Units(flat, layout) for flat in self._units.tensors), *(Units(each) for each in state)

    @property
    def _views(self) -> dict[str, torch.Tensor]:
        """Tensors ``[R + 1, ...]`` by name."""
        views = {f"{self.name}.{name}": view for name, view in zip(self._units.names, self._units.views)}
        if self._units.state is not None:
            for field, tensor in self._units.state._asdict().items():
                views[f"{self.name}.{field}"] = tensor
        return views

    @property
    def saved(self) -> dict[str, SavedTensor]:
        """Tensors of a snapshot by name: those of keys and values are ``[K, S, *]``."""
        return {name: SavedTensor(tuple(view.shape[1:]), view.dtype) for name, view in self._views.items()}

    def copy(self, rows: UnitCopies) -> None:
        """Copy rows within the store."""
        rows.copy_units(self._units)

    @torch.inference_mode()
    def snapshot(self, row: int, num_tokens: int) -> dict[str, torch.Tensor]:
        """Copy a row to the host; slots that are not seen behind ``num_tokens`` tokens are zeros."""
        layout, kind = self._units.layout, self._group.kind
        seen = kind.seen_slots(num_tokens, layout.num_slots)
        # Positions and scores have the slots of all heads and versions side by side.
        of_state = torch.zeros(kind.state_versions, 1, layout.num_slots, dtype=torch.bool)
        of_state[(num_tokens - 1) % kind.state_versions] = seen
        of_state = of_state.expand(-1, layout.num_heads, -1).flatten()
        found = {}
        for name, view in self._views.items():
            data = view[row].cpu()
            if data.ndim > 1:
                found[name] = torch.where(seen[:, None], data, torch.zeros((), dtype=data.dtype))
            else:
                found[name] = torch.where(of_state, data, 0.0 if data.is_floating_point() else FREE)
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
    def units(self) -> tuple[Units, ...]:
        """The same, with the rows in each."""
        return tuple(map(Units, self.tensors))

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

"""Units of the stores on their way to the host and back, between steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, groupby
from typing import NamedTuple

import torch

from hpu_duo.kv.store import KVStore
from kernels_ref import GroupKind, Owner, UnitLayout


class UnitTensor(NamedTuple):
    """The keys, or the values, of a group of heads of a layer.

    Attributes:
        name: distinct in a model.
        flat: the store as a list of vectors, ``[V, D]``.
        layout: places of the units.
        kind: of the group.
    """

    name: str
    flat: torch.Tensor
    layout: UnitLayout
    kind: GroupKind

    @property
    def unit_shape(self) -> tuple[int, int, int]:
        """Heads, slots and head size: the shape of a unit."""
        return self.layout.num_heads, self.layout.num_slots, self.flat.shape[-1]

    @property
    def is_of_blocks(self) -> bool:
        """Whether blocks own the units."""
        return self.kind.owner is Owner.BLOCK

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        heads, slots, dim = self.unit_shape
        return heads * slots * dim * self.flat.element_size()

    @torch.inference_mode()
    def read(self, units: Sequence[int]) -> torch.Tensor:
        """Copy units to the host, ``[n, K, S, D]``."""
        data = torch.empty((len(units), *self.unit_shape), dtype=self.flat.dtype)
        for place, begin, end in self._runs(units):
            data.view(-1, data.shape[-1])[place : place + end - begin].copy_(self.flat[begin:end])
        return data

    @torch.inference_mode()
    def write(self, units: Sequence[int], data: torch.Tensor) -> None:
        """Copy units ``[n, K, S, D]`` from the host into their places."""
        vectors = data.reshape(-1, data.shape[-1])
        for place, begin, end in self._runs(units):
            self.flat[begin:end].copy_(vectors[place : place + end - begin])

    def _runs(self, units: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield neighbours as one: the place of the first vector, and the range of them in the store."""
        size = self.layout.unit_stride
        dense = UnitLayout.dense(self.layout.num_units, self.layout.num_heads, self.layout.num_slots)
        assert self.layout == dense, f"units of {self.name} have room between them"
        order, place = count(), 0
        for _, run in groupby(units, lambda unit: unit - next(order)):
            taken = list(run)
            begin, end = taken[0] * size, (taken[-1] + 1) * size
            yield place, begin, end
            place += end - begin


def tensors_of(store: KVStore) -> Iterator[UnitTensor]:
    """Yield all tensors of the stores, in order of the layers."""
    for number, (layer, cache) in enumerate(zip(store.plan.layers, store.layers)):
        for place, (group, units) in enumerate(zip(layer.groups, cache)):
            name = f"layers.{number}.groups.{place}"
            yield UnitTensor(f"{name}.keys", units.k_flat, units.layout, group.kind)
            yield UnitTensor(f"{name}.values", units.v_flat, units.layout, group.kind)

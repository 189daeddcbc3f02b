"""Units of keys and values, which attention reads and writes in a store.

A *unit* is a block or a ring row. A store is a list of vectors; its layout gives the places of a unit's
vectors: head after head and, in a head, slot after slot. The keys of one head of one unit are contiguous, so
that a batched product reads them without a copy. The strides of heads and units may be larger than their
sizes: stores may be padded, or share their memory.

Shapes: X units, K heads, S slots, D head size, V vectors of a store.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch


class UnitLayout(NamedTuple):
    """Places of units in a store, counted in vectors; fixed for a captured step.

    Attributes:
        num_units, num_heads, num_slots: X, K and S.
        head_stride: from a head to the next one, at least S.
        unit_stride: from a unit to the next one.
        offset: of the first vector of a unit; more than 0 if another store's vectors come first.
    """

    num_units: int
    num_heads: int
    num_slots: int
    head_stride: int
    unit_stride: int
    offset: int = 0

    @classmethod
    def dense(cls, num_units: int, num_heads: int, num_slots: int) -> UnitLayout:
        """Units without any room between them."""
        return cls(num_units, num_heads, num_slots, num_slots, num_heads * num_slots)

    def view(self, flat_VD: torch.Tensor) -> torch.Tensor:
        """A store as ``[X, K, S, D]``, to be read.

        Args:
            flat_VD: the store, ``[X * unit_stride, D]``.
        """
        units = flat_VD.unflatten(0, (self.num_units, self.unit_stride))
        heads = units[:, self.offset : self.offset + self.num_heads * self.head_stride]
        return heads.unflatten(1, (self.num_heads, self.head_stride))[:, :, : self.num_slots]


class KVUnits(NamedTuple):
    """Units of a store of keys and of one of values.

    Attributes:
        k, v: ``[X, K, S, D]``, views to be read; vectors of a head lie side by side.
        k_flat, v_flat: the stores as lists of vectors, ``[V, D]``, to be written.
        layout: where the units lie, in both.
        scratch: units as they were before the step, for prompts to read, ``[C, K, S, D]``; None where a kind
            of heads needs none, or no prompt reads any.
        state: what is known of each slot, for kinds that choose their slots by it; else None.
        regions: whole texts of prompts under way, for kinds that choose at the end of a prompt; else None.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_flat: torch.Tensor
    v_flat: torch.Tensor
    layout: UnitLayout
    scratch: Scratch | None = None
    state: SlotState | None = None
    regions: PromptRegions | None = None

    def seen_anew(self) -> KVUnits:
        """The same units, with views of their own."""
        return as_units(self.k_flat, self.v_flat, self.layout, self.scratch, self.state, self.regions)


class SlotState(NamedTuple):
    """Numbers of each slot of each unit, with the slots of all heads of a unit side by side.

    They are small beside keys and values, and are read and written in one graph.

    Attributes:
        position: of the token in the slot, int32 ``[X, K * S]``.
        score: of that token, float32 ``[X, K * S]``.
    """

    position: torch.Tensor
    score: torch.Tensor


class PromptRegions(NamedTuple):
    """Keys and values of all tokens of prompts under way, in a region of vectors each, and scores of them.

    Attributes:
        k_flat, v_flat: lists of vectors, ``[P * (1 + L) * K, D]``. A region begins with K vectors that only
            padding writes; L tokens of each head follow.
        score: float32 ``[P, K * L]``.
        layout: of the regions, with a slot for each token of a text.
    """

    k_flat: torch.Tensor
    v_flat: torch.Tensor
    score: torch.Tensor
    layout: UnitLayout

    @staticmethod
    def layout_of(num_regions: int, num_heads: int, num_tokens: int) -> UnitLayout:
        """The layout of regions for texts of ``num_tokens`` tokens (L)."""
        size = num_heads * num_tokens
        return UnitLayout(num_regions, num_heads, num_tokens, num_tokens, size + num_heads, num_heads)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All tensors."""
        return self.k_flat, self.v_flat, self.score

    @property
    def units(self) -> KVUnits:
        """The regions as units, ``[P, K, L, D]``."""
        return as_units(self.k_flat, self.v_flat, self.layout)


class Scratch(NamedTuple):
    """Copies of some units, made before a step writes.

    Attributes:
        k, v: ``[C, K, S, D]``, dense.
    """

    k: torch.Tensor
    v: torch.Tensor


class NewKV(NamedTuple):
    """Keys and values of the new tokens of a step.

    Attributes:
        k, v: ``[Q, K, D]``.
    """

    k: torch.Tensor
    v: torch.Tensor


def as_units(
    k_flat: torch.Tensor,
    v_flat: torch.Tensor,
    layout: UnitLayout,
    scratch: Scratch | None = None,
    state: SlotState | None = None,
    regions: PromptRegions | None = None,
) -> KVUnits:
    """The units of two stores ``[V, D]`` of one layout."""
    return KVUnits(layout.view(k_flat), layout.view(v_flat), k_flat, v_flat, layout, scratch, state, regions)


def of_stores(k_XKSD: torch.Tensor, v_XKSD: torch.Tensor) -> KVUnits:
    """The units of two contiguous stores."""
    num_units, num_heads, num_slots, dim = k_XKSD.shape
    layout = UnitLayout.dense(num_units, num_heads, num_slots)
    return KVUnits(k_XKSD, v_XKSD, k_XKSD.view(-1, dim), v_XKSD.view(-1, v_XKSD.shape[-1]), layout)


def copy_to_scratch(caches: Iterable[Iterable[KVUnits]], unit: torch.Tensor) -> None:
    """Copy units of every store that has a scratch there, before a step writes to the stores.

    Args:
        caches: units of each group of heads, of each layer.
        unit: units to copy, in the order of their places, int32 ``[C]``.
    """
    for cache in caches:
        for units in cache:
            if units.scratch is not None:
                copy_units(units.k_flat, units.v_flat, units.layout, *units.scratch, unit)


def copy_units(
    k_flat: torch.Tensor,
    v_flat: torch.Tensor,
    layout: UnitLayout,
    k_copy: torch.Tensor,
    v_copy: torch.Tensor,
    unit: torch.Tensor,
) -> None:
    """Copy units of two stores into a scratch; see ``copy_to_scratch``."""
    for copy, flat in ((k_copy, k_flat), (v_copy, v_flat)):
        copy.copy_(layout.view(flat).index_select(0, unit))


def gather_units(units: KVUnits, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some units, ``[len(index), K, S, D]`` each."""
    return units.k.index_select(0, index), units.v.index_select(0, index)

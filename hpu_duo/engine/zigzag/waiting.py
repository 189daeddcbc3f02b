"""Hidden states of groups of rows that wait for their turn, in memory of the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch

from hpu_duo.device.runtime import host_memory
from hpu_duo.modeling.weight_stream import Move, Mover, StreamMover
from hpu_duo.not_picklable import NotPicklable


class _Stored(NamedTuple):
    """Hidden states of a group: what stores them on the device, as bytes, and their copy on the host."""

    on_device: torch.Tensor
    on_host: torch.Tensor


class WaitingOnHost(NotPicklable):
    """Hidden states that lie on the host while their group waits in front of a layer.

    They leave while the next group computes, and come back while the group before does. Their tensors stay
    the same, without memory meanwhile.

    Args:
        groups: numbers of the groups whose hidden states do so.
        num_bytes: of the hidden states of the largest step.
        up, down: copy to the device, and from it.

    Attributes:
        num_bytes: that have left so far.

    Raises:
        ValueError: the host has too little memory.
    """

    def __init__(self, groups: Collection[int], num_bytes: int, up: Mover, down: Mover) -> None:
        self._groups, self._up, self._down = frozenset(groups), up, down
        if num_bytes > (free := host_memory().free):
            raise ValueError(
                f"expected hidden states on the host within its free memory, {free:,} bytes, got "
                f"{num_bytes:,} bytes of a step of max_num_batched_tokens"
            )
        self._area = self._reserved(num_bytes)
        self._num_used, self._rooms = 0, dict[int, torch.Tensor]()
        self.num_bytes = 0
        self._leaving: tuple[int, _Stored, Move] | None = None
        self._away, self._coming = dict[int, _Stored](), dict[int, Move]()

    def forget(self) -> None:
        """Wait for copies of a step that has ended, with an error perhaps."""
        try:
            for move in self._coming.values():
                move.hold()
            self._settle()
        finally:
            self._away.clear()
            self._coming.clear()
            self._num_used, self._rooms = 0, {}

    def leave(self, group: int, layer: Callable[[], Any] | None) -> None:
        """Begin to copy the hidden states of a group to the host; what computed them has been launched.

        Args:
            layer: the call that it waits for; None = it has ended.
        """
        self._settle()
        if layer is None or group not in self._groups:
            return
        assert isinstance(layer, partial), "expected the call of a layer"
        hidden = layer.args[0] if layer.args else layer.keywords["hidden_states"]
        with torch.inference_mode(mode=False):  # other threads write to it
            whole = torch.empty(0, dtype=torch.uint8, device=hidden.device)
            on_device = whole.set_(hidden.untyped_storage())
        stored = _Stored(on_device, self._room(group, len(on_device)))
        self._leaving = group, stored, self._down.move(stored.on_device, stored.on_host)
        self.num_bytes += len(on_device)

    def fetch(self, group: int) -> None:
        """Begin to copy hidden states of a group back, if they are away."""
        if self._leaving is not None and self._leaving[0] == group:
            self._settle()
        if (stored := self._away.pop(group, None)) is not None:
            stored.on_device.untyped_storage().resize_(len(stored.on_host))
            self._coming[group] = self._up.move(stored.on_host, stored.on_device)

    def enter(self, group: int) -> None:
        """Let computation of a group wait for its hidden states."""
        self.fetch(group)
        if (coming := self._coming.pop(group, None)) is not None:
            coming.hold()

    def _settle(self) -> None:
        """Free the memory of what has left."""
        if self._leaving is not None:
            group, stored, move = self._leaving
            self._leaving = None
            move.hold()
            stored.on_device.untyped_storage().resize_(0)
            self._away[group] = stored

    def describe(self, num_groups: int) -> str:
        """Return a note on what the host holds."""
        return (
            f"hidden states of {len(self._groups)} of {num_groups} groups lie on the host while they wait, "
            f"in {len(self._area) / 2**20:,.3g} MiB"
        )

    def _room(self, group: int, num_bytes: int) -> torch.Tensor:
        """Memory of the host for a group, until the step has ended."""
        room = self._rooms.get(group)
        if room is None or len(room) < num_bytes:
            end = self._num_used + num_bytes
            if end > len(self._area):  # models whose layers pass on more than hidden states
                self._area, self._num_used, end = self._reserved(2 * end), 0, num_bytes
            room = self._rooms[group] = self._area[self._num_used : end]
            self._num_used = end
        return room[:num_bytes]

    def _reserved(self, num_bytes: int) -> torch.Tensor:
        """Memory that lives as long as this object, since a copy may still read it."""
        with torch.inference_mode(mode=False):
            area = torch.empty(num_bytes, dtype=torch.uint8)
        if isinstance(self._down, StreamMover):
            unpin = self._down.pin(area)
            weakref.finalize(self, lambda kept: unpin() or kept, area)
        return area

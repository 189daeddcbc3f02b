"""Rows of a step with blocks in host memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hpu_duo.engine.on_host.crossing import Run, runs_of
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.kv.pool import CopyLists

T = TypeVar("T")


class HostRow(NamedTuple):
    """A row of a step with blocks on the host.

    Attributes:
        ring_row: its row.
        first: flat index of its first new token.
        num_new: new tokens.
        blocks: on the host, in order.
        is_decode: whether it decodes.
    """

    ring_row: int
    first: int
    num_new: int
    blocks: tuple[int, ...]
    is_decode: bool


class HostContext(NamedTuple):
    """The part of a step that lies on the host.

    Attributes:
        copies: blocks of the device, and the blocks of the host that they are copied to before the step
            writes anything, int32 ``[2, n]``.
        rows: those with blocks there.
        decode_len: most new tokens of a decode row (M); attention there has so many of each.
    """

    copies: npt.NDArray[np.int32]
    rows: tuple[HostRow, ...]
    decode_len: int

    @classmethod
    def of(cls, plan: StepPlan) -> HostContext:
        """Return that of a planned step."""
        rows, first = [], 0
        for row in plan.rows:
            if row.request.host_blocks:
                blocks, is_decode = tuple(row.request.host_blocks), row.num_new_tokens <= plan.decode_len
                rows.append(HostRow(row.ring_row, first, row.num_new_tokens, blocks, is_decode))
            first += row.num_new_tokens
        return cls(CopyLists.of(plan.moves).to_host, tuple(rows), plan.decode_len)


class HostTile(NamedTuple):
    """Some blocks of a row.

    Attributes:
        row: whose blocks they are.
        runs: copies that bring them from the host to the first units of a buffer.
        blocks: of the host.
    """

    row: HostRow
    runs: list[Run]
    blocks: tuple[int, ...]


class Attending:
    """Rows that attend on the host in a step, and those whose blocks move to the device.

    What layers share is built once, at its first use.
    """

    def __init__(self, there: Sequence[HostRow] = (), moved: Sequence[HostRow] = ()) -> None:
        self.there, self.moved = tuple(there), tuple(moved)
        self.num_blocks = sum(len(row.blocks) for row in there)
        self._built = dict[Hashable, Any]()

    def once(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return what has been built for a key, or build it."""
        if key not in self._built:
            self._built[key] = build()
        built: T = self._built[key]
        return built

    @cached_property
    def owner(self) -> torch.Tensor:
        """Entry of ``there`` whose block each block of the host is, or one that no row has, int32."""
        owner = torch.full((max((max(row.blocks) for row in self.there), default=-1) + 1,), len(self.there))
        for entry, row in enumerate(self.there):
            owner[list(row.blocks)] = entry
        return owner.to(torch.int32)

    def tiles(self, size: int) -> list[HostTile]:
        """Blocks of ``moved`` in tiles of at most ``size``."""
        return self.once(("tiles", size), partial(self._tiles_of, size))

    def _tiles_of(self, size: int) -> list[HostTile]:
        tiles = []
        for row in self.moved:
            for begin in range(0, len(row.blocks), size):
                blocks = row.blocks[begin : begin + size]
                tiles.append(HostTile(row, runs_of(blocks, range(len(blocks))), blocks))
        return tiles

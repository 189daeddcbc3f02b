"""Buffers of the device through which blocks of the host pass, in the order in which they are used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from hpu_duo.engine.on_host.crossing import Crossing
from hpu_duo.engine.on_host.rows import HostTile
from hpu_duo.engine.on_host.worker import Worker
from kernels_ref import KVUnits


class GroupAhead(NamedTuple):
    """The group of a step's rows whose blocks in a layer are copied ahead, where several take turns.

    Attributes:
        num_groups: of the step.
        num_rows: of this group.
        row_blocks: most blocks of a row.
    """

    num_groups: int
    num_rows: int
    row_blocks: int

    def tiles(self, num_blocks: int, most: int) -> tuple[int, int]:
        """Return the blocks of a tile, and the number of tiles: one in use, and those of the group.

        A tile has blocks of one row.

        Args:
            num_blocks: of the host.
            most: blocks of a tile.
        """
        size = min(most, self.row_blocks)
        is_split = size < self.row_blocks
        return size, 1 + self.num_rows + is_split * (num_blocks // (self.num_groups * size))


class NextTile(NamedTuple):
    """A tile of a step.

    Attributes:
        key: numbers of the layer and of the group of heads.
        tile: blocks of a row.
    """

    key: tuple[int, int]
    tile: HostTile


class TilesAhead:
    """The tiles of a step, which are copied ahead to all buffers but the one in use.

    Args:
        buffers: units of the device, used in turn.
        order: all tiles of the step, in the order in which the device attends to them.
        copy: copies a tile to a buffer, and is called by a worker.
        worker: of the host.
    """

    def __init__(
        self,
        buffers: Sequence[KVUnits],
        order: Iterable[NextTile],
        copy: Callable[[NextTile, KVUnits], None],
        crossing: Crossing,
        worker: Worker,
    ) -> None:
        self._copy, self._crossing, self._worker = copy, crossing, worker
        self._order: Iterator[NextTile] = iter(order)
        self._coming = deque[tuple[NextTile, KVUnits, Callable[[], None]]]()
        self._free = buffers[-1]
        for buffer in buffers[:-1]:
            self._begin(buffer)

    def _begin(self, buffer: KVUnits) -> None:
        following = next(self._order, None)
        if following is not None:
            arrived = self._crossing.begin_tile(self._worker, partial(self._copy, following, buffer))
            self._coming.append((following, buffer, arrived))

    def take(self, wanted: NextTile) -> KVUnits:
        """Wait for the next tile, and return it; what reads the one before has been launched.

        Args:
            wanted: the tile that is expected.
        """
        following, buffer, arrived = self._coming.popleft()
        assert following == wanted, f"expected the tiles of {wanted.key}, got those of {following.key}"
        arrived()
        self._begin(self._free)
        self._free = buffer
        return buffer

"""Allocation of host memory to leading KV blocks of running requests, and which blocks move there."""

from __future__ import annotations

from collections.abc import Iterable

from hpu_duo.kv.pool import BlockPool, HostCopy
from hpu_duo.request import Request

_STAYING = 3
"""Most blocks of a request that cannot move: its last full one, a partly filled one, and one that rounding of
its new tokens adds."""


def fewest_blocks(num_new_blocks: int, max_num_seqs: int) -> int:
    """Return the blocks that the device needs for any step, if all others may be on the host.

    Args:
        num_new_blocks: blocks that the tokens of a step fill.
    """
    return num_new_blocks + _STAYING * max_num_seqs


class HostBlocks:
    """Allocates blocks of the host to running requests.

    A block moves there when the device has none left, and stays until its request ends or is preempted. The
    blocks of a request on the host are always its leading ones, and each is full. Its last full block stays
    on the device, as do blocks that other requests share.

    Args:
        num_blocks: blocks of the host.
        block_size: tokens of a block.
        fewest: see ``fewest_blocks``.

    Attributes:
        num_blocks: as given.
        num_moved: blocks that have moved so far.
    """

    def __init__(self, num_blocks: int, block_size: int, fewest: int) -> None:
        self.num_blocks, self.num_moved = num_blocks, 0
        self._pool, self._block_size, self._fewest = BlockPool(num_blocks), block_size, fewest

    @property
    def num_used(self) -> int:
        """Number of blocks of requests."""
        return self.num_blocks - self._pool.num_free

    def room_beside(self, blocks: BlockPool) -> int:
        """Return the free blocks of the host; 0 while shared blocks leave the device too few for its steps.

        Args:
            blocks: of the device.
        """
        return self._pool.num_free if blocks.num_shared + self._fewest <= blocks.num_blocks else 0

    def _num_whole(self, request: Request) -> int:
        """Number of blocks on the device that may move if no other request shares them."""
        return request.num_computed_tokens // self._block_size - 1 - len(request.host_blocks)

    def move(self, requests: Iterable[Request], count: int, blocks: BlockPool) -> list[HostCopy]:
        """Move up to ``count`` blocks, from the request with the most that may move on.

        Args:
            requests: all with a row.
            blocks: of the device, where those that move are freed.

        Returns:
            The copies, in order, to be executed before a step writes anything.
        """
        copies: list[HostCopy] = []
        for request in sorted(requests, key=self._num_whole, reverse=True):
            for _ in range(min(self._num_whole(request), count - len(copies), self._pool.num_free)):
                block = int(request.block_table[len(request.host_blocks)])
                if blocks.num_holders(block) != 1:
                    break
                [slot] = self._pool.allocate(1)
                copies.append(HostCopy(block, slot))
                request.host_blocks.append(slot)
                blocks.release([block])
        self.num_moved += len(copies)
        return copies

    def release(self, request: Request) -> None:
        """Free the blocks of a request."""
        self._pool.release(request.host_blocks)
        request.host_blocks = []

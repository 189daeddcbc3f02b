"""Preempted requests that leave to host memory, and come back from there with all their computed tokens."""

from __future__ import annotations

from collections.abc import Iterator

from hpu_duo.kv.allocations import KVAllocations
from hpu_duo.kv.tiers.policy import LoadPolicy
from hpu_duo.kv.tiers.swap import PreemptionMode, SwapSpace
from hpu_duo.request import Request, RequestStatus


class Swapping:
    """Swaps requests for a scheduler.

    A victim keeps its row, and the blocks that are not copied yet, until reserved units are free for them;
    the last blocks leave first, and each is free in the step that copies it. The victim then waits like
    others. It is admitted with all of its blocks, takes part in no step until their content has arrived, and
    goes on where it was.

    Args:
        allocations: of the scheduler.
        space: room on the host; an attribute too.
        mode: swap, or auto.
        policy: predicts whether that is faster than computing tokens again.
    """

    def __init__(
        self, allocations: KVAllocations, space: SwapSpace, mode: PreemptionMode, policy: LoadPolicy
    ) -> None:
        self.space = space
        self._allocations, self._mode, self._policy = allocations, mode, policy
        self._coming: list[Request] = []

    @property
    def is_leaving(self) -> bool:
        """Whether any request has blocks, or a row, that could not be copied yet."""
        return bool(self.space.leaving)

    def has(self, request: Request) -> bool:
        """Whether a request is swapped."""
        return self.space.has(request)

    def is_there(self, request: Request) -> bool:
        """Whether all of a swapped request has reached the host, so that it can come back."""
        return self.space.is_there(request)

    def begin(self, victim: Request) -> bool:
        """Begin to swap a running request out; otherwise only its unused blocks are freed.

        Requests of contexts are computed again: they come back with the blocks of their own, for which there
        is room, where copies of the context's might never fit beside it.
        """
        self._allocations.shrink(victim)
        may_leave = victim.context is None and victim.num_computed_tokens and self._pays(victim)
        if may_leave and self.space.begin(victim):
            victim.status = RequestStatus.MOVING
            self._allocations.release_prefix(victim)
            return True
        self.space.counters.num_recomputed += 1
        return False

    def _pays(self, victim: Request) -> bool:
        if self._mode is PreemptionMode.SWAP:
            return True
        num_bytes = 2 * self.space.num_bytes(victim.num_blocks)
        return self._policy.loads(victim.num_computed_tokens, num_bytes, 0)

    def left(self) -> Iterator[Request]:
        """Copy more of those that leave; yield the ones that have no row any more, and wait."""
        for request in self.space.leaving:
            if self.space.leave(request, self._allocations.drop_last_block):
                self._allocations.close(request)
                yield request

    def come(self, request: Request) -> None:
        """Begin to bring back a request that has been admitted."""
        self._allocations.open(request)
        has_room = self._allocations.grow(request, request.num_computed_tokens)
        assert has_room, "expected room for an admitted request"
        request.status = RequestStatus.MOVING
        self._coming.append(request)
        self.space.bring(request)

    def arrived(self) -> list[Request]:
        """Go on bringing requests back; returns those that are."""
        found = [request for request in self._coming if self.space.bring(request)]
        self._coming = [request for request in self._coming if request not in found]
        return found

    def stop(self) -> Request | None:
        """Free row and blocks of the latest request that comes back, if there is one, which waits again."""
        if not self._coming:
            return None
        request = max(self._coming, key=lambda each: each.arrival)
        self._coming.remove(request)
        self.space.stop(request)
        self._allocations.close(request)
        return request

    def drop(self, request: Request) -> None:
        """Forget a request that ends; nothing happens if it is not swapped."""
        if request in self._coming:
            self._coming.remove(request)
        self.space.drop(request)

    def lost(self) -> list[Request]:
        """Return the requests whose content was lost since the last call, and which have not ended."""
        lost = [request for request in self.space.take_lost() if not request.is_finished]
        self._coming = [request for request in self._coming if request not in lost]
        return lost

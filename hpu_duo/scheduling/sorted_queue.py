"""A sorted queue whose first acceptable item is found without asking about the same items again and again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from _typeshed import SupportsRichComparison

Item = TypeVar("Item", bound=Hashable)
Key = TypeVar("Key", bound="SupportsRichComparison")


class SortedQueue(Generic[Item, Key]):
    """Items in the order of keys, no two of which are equal.

    Items may be refused for a step. The leading ones that are refused are not looked at again in that step,
    so that the first that is accepted is found ``n`` times in a queue of ``n`` with ``2 * n`` looks at most.
    """

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._items: list[Item] = []
        self._key_of: dict[Item, Key] = {}
        # Leading items that were refused in a step.
        self._num_refused, self._step = 0, -1

    def put(self, item: Item, key: Key) -> None:
        """Put an item at its place, or at another one; it may have been refused before.

        The item is taken for accepted again, and so are those behind it.
        """
        self.discard(item)
        place = bisect_left(self._keys, key)
        self._keys.insert(place, key)
        self._items.insert(place, item)
        self._key_of[item] = key
        self._num_refused = min(self._num_refused, place)

    def discard(self, item: Item) -> bool:
        """Take an item out if it is in here; returns whether it was."""
        if item not in self._key_of:
            return False
        place = bisect_left(self._keys, self._key_of.pop(item))
        del self._keys[place], self._items[place]
        self._num_refused -= place < self._num_refused
        return True

    def accepted(self, accepts: Callable[[Item], bool], step: int) -> Iterator[Item]:
        """Yield the items that are accepted, in order; the queue must not change meanwhile.

        Args:
            accepts: whether an item is; those that are refused stay so in this step, unless put in again.
            step: number of the step.
        """
        if step != self._step:
            self._num_refused, self._step = 0, step
        while self._num_refused < len(self._items) and not accepts(self._items[self._num_refused]):
            self._num_refused += 1
        for place in range(self._num_refused, len(self._items)):
            if accepts(self._items[place]):
                yield self._items[place]

    def first_accepted(self, accepts: Callable[[Item], bool], step: int) -> Item | None:
        """Return the first item that is accepted, None if there is none; see ``accepted``."""
        return next(self.accepted(accepts, step), None)

    @property
    def first(self) -> Item:
        """The item of the least key; there must be one."""
        return self._items[0]

    @property
    def last(self) -> Item:
        """The item of the greatest key; there must be one."""
        return self._items[-1]

    @property
    def least(self) -> Key:
        """The least key; there must be one."""
        return self._keys[0]

    def __contains__(self, item: object) -> bool:
        return item in self._key_of

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

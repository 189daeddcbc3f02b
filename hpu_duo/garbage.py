"""Garbage collection without long-lived objects and without long pauses."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_known_left_out = False
"""Whether this module has left objects out of collections; ``gc.get_freeze_count`` walks them all."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector inside, whatever happens there; one that is off stays off.

    The collector scans all objects repeatedly while their number grows, and hardly any of a model's modules,
    graphs or imports is garbage. For work that ends: what is garbage inside is found after it, by the next
    collection of all objects; to those that come before, all that is there is old.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # What is left out of collections would come back.
            if not (_known_left_out or gc.get_freeze_count()):
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def leave_out_what_is_there() -> None:
    """Collect, and leave all objects that are there out of later collections.

    For a serving process: one collection of all loaded objects would take longer than a step.
    """
    global _known_left_out
    gc.collect()
    gc.freeze()
    _known_left_out = True


def unfreeze() -> None:
    """Let collections visit again what was left out of them."""
    global _known_left_out
    gc.unfreeze()
    _known_left_out = False


_YOUNG, _MIDDLE, _OLD = 300, 1, 2200
"""Thresholds of a process that serves: 900 objects are visited at a time, and all only after 2,000,000."""
_IDLE_TICKS = 10
_LEAST_MIDDLE = 45


@contextmanager
def short_collections() -> Iterator[None]:
    """Context manager with collections of about a millisecond each, without objects that exist already.

    For a serving process: a full collection would block all requests, for 0.3 s with a router's 100,000
    prompts. So objects that have outlived two collections are left to an ``IdleCollector``, or until there
    are two million of them.
    """
    thresholds = gc.get_threshold()
    leave_out_what_is_there()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class IdleCollector:
    """Collects everything while nobody is served; what is left then is left out of later collections.

    So its time depends on new objects since the last one: some 20 ms. Each ``full_every``-th collection
    visits all objects, since those that were left out may be garbage by then.
    """

    def __init__(self, full_every: int = 16) -> None:
        self._full_every = full_every
        self._num_idle = self._num_collections = 0

    def tick(self, is_idle: bool) -> bool:
        """Collect behind the tenth idle tick in a row if 40,000 objects have come; returns whether it did."""
        self._num_idle = self._num_idle + 1 if is_idle else 0
        if self._num_idle < _IDLE_TICKS or gc.get_count()[2] < _LEAST_MIDDLE:
            return False
        self._num_idle = 0
        self._num_collections += 1
        if self._num_collections % self._full_every == 0:
            unfreeze()
        leave_out_what_is_there()
        return True

"""The collector of cyclic garbage, kept from what stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector inside, whatever happens there; one that is off stays off.

    It looks at all objects again and again while their number grows, and hardly any of a model's modules,
    graphs or imports is garbage. For work that ends: what is garbage inside is found after it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def leave_out_what_is_there() -> None:
    """Collect, and leave all objects that are there out of later collections.

    For a process that serves: one collection of everything that it has loaded would take longer than a step.
    """
    gc.collect()
    gc.freeze()

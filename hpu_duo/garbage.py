"""The collector of cyclic garbage, paused where much is made that stays."""

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

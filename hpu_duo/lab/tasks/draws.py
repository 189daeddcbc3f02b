"""Random choices that are the same on every platform and Python version.

Only ``random.Random.random`` is drawn from, whose sequence Python promises to keep.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def choice(rng: random.Random, options: Sequence[T]) -> T:
    """One of the options; takes one number from ``rng``."""
    return options[int(rng.random() * len(options))]


def sample(rng: random.Random, options: Sequence[T], count: int) -> list[T]:
    """Choose ``count`` of the options, each at most once; takes as many numbers from ``rng``.

    Raises:
        ValueError: there are fewer.
    """
    if count > len(options):
        raise ValueError(f"expected at most {len(options)} draws without replacement, got {count}")
    # The first places of a Fisher-Yates shuffle.
    pool = list(options)
    for i in range(count):
        j = i + int(rng.random() * (len(pool) - i))
        pool[i], pool[j] = pool[j], pool[i]
    return pool[:count]

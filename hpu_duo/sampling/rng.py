"""Random numbers as a pure function of (seed, draw number): no generator, so nothing to save or advance.

Draw ``i`` of a request is the same number whatever else is in the batch, in whichever step it happens, and
after a preemption. All arithmetic is on 64-bit unsigned integers, so every platform gives the same bits.

Source: the finaliser of SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2714064.2660195), applied to the
seed and again to the mixed seed plus a multiple of the golden gamma.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1

# 23 bits, so that the midpoint (k + 0.5) / 2**23 of every cell is exact in float32 and never 0 or 1.
_UNIFORM_BITS = 23


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of uint64 in which every input bit changes about half of the output bits."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))


def random_bits(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """64 random bits per (seed, counter).

    Args:
        seeds: uint64 [N].
        counters: integer [N], non-negative: the number of the draw within its seed's stream.
    """
    if seeds.dtype != np.uint64:
        raise ValueError(f"seeds: expected dtype uint64, got {seeds.dtype}")
    if seeds.shape != counters.shape:
        raise ValueError(f"counters: expected the shape of seeds {seeds.shape}, got {counters.shape}")
    steps = (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN_GAMMA)
    # Mixing the seed first keeps the streams of seeds s and s + gamma from being shifts of each other.
    return _mix(_mix(seeds + np.uint64(_GOLDEN_GAMMA)) + steps)


def uniform(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """One uniform number per (seed, counter), in the open interval (0, 1), with a resolution of 2**-23.

    Args:
        seeds: uint64 [N].
        counters: integer [N], non-negative.

    Returns:
        float32 [N], each of the form (k + 0.5) / 2**23, exact.
    """
    cells = random_bits(seeds, counters) >> np.uint64(64 - _UNIFORM_BITS)
    return ((cells.astype(np.float64) + 0.5) * 2.0**-_UNIFORM_BITS).astype(np.float32)


def wrap_seed(seed: int) -> int:
    """The uint64 that stands for any Python integer seed, negative and large ones included."""
    return seed & _MASK


def derive_seed(base_seed: int, *path: int) -> int:
    """A seed for one branch of a tree of streams, for example ``derive_seed(seed, sample_index)``.

    The order of the path matters, and the seeds of a path's extensions are unrelated to its own.

    Args:
        base_seed: any integer.
        path: indices of the branches to follow from the base, for example (request_index, sample_index).

    Returns:
        An integer in [0, 2**64).
    """
    seed = wrap_seed(base_seed)
    for index in path:
        keyed = np.array([wrap_seed(seed ^ _MIX_2)], dtype=np.uint64)
        seed = int(random_bits(keyed, np.array([wrap_seed(index)], dtype=np.uint64))[0])
    return seed

"""Random numbers as a pure function of (seed, draw number), and sparse values of logits from the host."""

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


# Lists are padded to powers of two so that few distinct shapes reach the device.
_MIN_SIZE = 16


class PositionList:
    """Values of (row, token) pairs, gathered row by row.

    Args:
        num_rows: N.
        vocab_size: V, with N * V < 2**31.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._num_positions = num_rows * vocab_size
        self._vocab_size = vocab_size
        self._parts: list[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.float32]]] = []
        self._size = 0

    def add(self, row: int, token_ids: npt.NDArray[np.int32], values: npt.NDArray[np.float32]) -> None:
        """Add the tokens int32 [M] of one row with their values float32 [M].

        Raises:
            ValueError: a token id is not in [0, V); it would silently change a neighbouring row.
        """
        if len(token_ids) == 0:
            return
        # Seen as unsigned, a negative id is too large as well.
        if token_ids.view(np.uint32).max() >= self._vocab_size:
            raise ValueError(
                f"row {row}: expected token ids in [0, {self._vocab_size}), "
                f"got [{token_ids.min()}, {token_ids.max()}]"
            )
        self._parts.append((row, token_ids, values))
        self._size += len(token_ids)

    @property
    def padded_size(self) -> int:
        """Length of the padded lists; 0 if nothing was added."""
        return pad_to_power_of_two(self._size) if self._size else 0

    def write(self, columns: npt.NDArray[np.float32]) -> None:
        """Fill ``columns``, ``[3, padded_size]``: values, rows, tokens.

        Padding has value 0 and distinct places: a device adds colliding ones one after the other.
        """
        values, rows, tokens = columns
        at = 0
        for row, token_ids, part in self._parts:
            end = at + len(token_ids)
            values[at:end], rows[at:end], tokens[at:end] = part, row, token_ids
            at = end
        num_padding = len(values) - at
        distinct = np.arange(min(num_padding, self._num_positions), dtype=np.int32)
        values[at:] = 0.0
        rows[at:], tokens[at:] = np.divmod(np.resize(distinct, num_padding), np.int32(self._vocab_size))


def pad_to_power_of_two(size: int) -> int:
    """The smallest power of two that holds ``size``, at least 16."""
    return max(_MIN_SIZE, 1 << (size - 1).bit_length())

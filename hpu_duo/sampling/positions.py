"""Sparse values of the [N, V] logit matrix, as the host sends them.

Rows and tokens are float32 like their values, so that all inputs of sampling are one array. They are exact
below 2**24, which ``SamplingBatch`` checks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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

"""The rows of one step as numpy arrays: the input of every host plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

Int32Array = np.ndarray


@dataclass(frozen=True)
class StepRows:
    """The tokens and requests of a step, unpadded, one entry per row.

    A *row* is one running request in this step. Its new tokens lie side by side in the flat
    batch, at ``[query_start, query_start + num_new)``.

    Attributes:
        row_id: ring row of the request, int32 ``[n]``, distinct.
        start: tokens whose keys and values were stored before the step, int32 ``[n]``.
        num_new: tokens that this step computes, int32 ``[n]``, at least 1.
        block_ids: block tables of all rows laid end to end, int32 ``[sum(num_blocks)]``.
        num_blocks: length of each row's table, int32 ``[n]``: enough for ``start + num_new``
            tokens, or 0 in every row of a model without retrieval heads.
        decode_len: most new tokens of a decode row (M).
        region: of each row's prompt, where prompts under way are kept whole, negative for none, int32
            ``[n]``; else None.
    """

    row_id: Int32Array
    start: Int32Array
    num_new: Int32Array
    block_ids: Int32Array
    num_blocks: Int32Array
    decode_len: int = 1
    region: Int32Array | None = None

    @property
    def num_rows(self) -> int:
        """Requests that run in this step."""
        return len(self.row_id)

    @property
    def query_start(self) -> Int32Array:
        """Flat index of each row's first new token, int32 ``[n]``."""
        return self.num_new.cumsum(dtype=np.int32) - self.num_new

    @cached_property
    def is_decode(self) -> np.ndarray:
        """Rows with up to ``decode_len`` new tokens: they are written first and read back from the cache."""
        return self.num_new <= self.decode_len

    @cached_property
    def context_len(self) -> Int32Array:
        """Tokens that each row reads from the cache parts, int32 ``[n]``.

        A decode row finds its own keys there too; a prompt row finds its new keys in the causal part
        and only older ones in the cache.
        """
        return self.start + np.where(self.is_decode, self.num_new, 0)


def ranges(lengths: np.ndarray) -> Int32Array:
    """``[0..lengths[0]), [0..lengths[1]), ...`` laid end to end, int32 ``[sum(lengths)]``."""
    ends = lengths.cumsum(dtype=np.int32)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int32) - (ends - lengths).repeat(lengths)

"""Numbers of operators that a layer launches, which is what small steps take their time for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from graphs.shape import Phase


@dataclass(frozen=True)
class Launches:
    """Operators that a layer launches, by what a step runs.

    The defaults are those of the portable kernels for an eight-billion-parameter Llama, as ``hpu-duo audit``
    counts them. A part that runs without anything to do launches its own all the same.

    Attributes:
        layer: whatever runs.
        causal, causal_slice: for the causal part, and for each ``query_slice`` query tokens of it.
        shared, shared_chunk: for the shared part, and for each chunk of gathered blocks: as many blocks as
            make ``shared_pairs`` pairs with query tokens, at most ``shared_blocks``, and at least one.
        unique, unique_chunk: for the unique part, and for each ``unique_blocks`` blocks of it.
        query_slice, shared_pairs, shared_blocks, unique_blocks: see there.
    """

    layer: float = 33.0
    causal: float = 8.0
    causal_slice: float = 26.0
    shared: float = 16.0
    shared_chunk: float = 45.0
    unique: float = 47.0
    unique_chunk: float = 31.0
    query_slice: int = 512
    shared_pairs: int = 4096
    shared_blocks: int = 64
    unique_blocks: int = 64

    def at(self, phase: Phase, query_len: Any, num_shared_blocks: Any, num_unique_blocks: Any) -> Any:
        """Operators of a layer, or of each of many steps when sizes are arrays that broadcast together.

        Chunks beyond the first are counted in parts, so that the count does not jump; it never falls with a
        size.
        """
        count: Any = self.layer
        if phase.causal:
            count = count + self.causal + self.causal_slice * np.maximum(query_len / self.query_slice, 1.0)
        if phase.shared:
            blocks = np.clip(self.shared_pairs / query_len, 1.0, self.shared_blocks)
            count = count + self.shared + self.shared_chunk * _chunks(num_shared_blocks, blocks)
        if phase.unique:
            chunks = _chunks(num_unique_blocks, self.unique_blocks)
            count = count + self.unique + self.unique_chunk * chunks
        return count


def _chunks(num_blocks: Any, size: Any) -> Any:
    return np.where(num_blocks > 0, np.maximum(num_blocks / size, 1.0), 0.0)

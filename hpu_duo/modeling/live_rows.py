"""Numbers of rows of a padded step that are not padding, for layers that can skip padding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from graphs import BatchShape


class LiveRows:
    """Two pairs of numbers that captured layers read as they run: rows they get, and rows that count.

    A layer that gets another number of rows than its pair says computes all of them, as all do before the
    first step.

    Attributes:
        tokens, logits: int32 ``[2]`` on the host, for layers that see query tokens, and for the model's head.
    """

    def __init__(self) -> None:
        self.tokens, self.logits = (torch.zeros(2, dtype=torch.int32) for _ in range(2))
        self._tokens, self._logits = self.tokens.numpy(), self.logits.numpy()

    def set(self, shape: BatchShape, bucket: BatchShape, decode_len: int = 1) -> None:
        """The next step has ``shape`` and runs as ``bucket``; rows that count come first in both.

        Args:
            decode_len: logits of each row.
        """
        num_logits = shape.num_logits * decode_len
        # Rows of a head that is not known as one may be as many as the tokens.
        live = max(shape.query_len, num_logits)
        self._tokens[:] = bucket.query_len, live
        self._logits[:] = bucket.num_logits * decode_len, num_logits

    @contextmanager
    def none_of(self, bucket: BatchShape, decode_len: int = 1) -> Iterator[None]:
        """Steps inside run as ``bucket`` and are padding from the first row to the last."""
        self._tokens[:] = bucket.query_len, 0
        self._logits[:] = bucket.num_logits * decode_len, 0
        try:
            yield
        finally:
            self._tokens[:] = self._logits[:] = 0

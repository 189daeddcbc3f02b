"""Rules of visibility, by position: the only place where attention visibility is decided.

Every function works on numpy arrays and on torch tensors alike, broadcasts its arguments, and
returns booleans. Positions are those of the original text: nothing is renumbered when a
streaming head forgets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any


class Window(NamedTuple):
    """Window of a streaming head: the first ``sink`` tokens and the last ``recent`` ones.

    ``sink=0`` is a plain sliding window. ``recent`` counts the query token itself, as
    transformers counts ``sliding_window``.
    """

    sink: int
    recent: int

    @property
    def size(self) -> int:
        """Slots of the ring that stores such a window."""
        return self.sink + self.recent

    def validate(self) -> Window:
        """Return self; raise ``ValueError`` when no token could see itself."""
        if self.sink < 0 or self.recent < 1:
            raise ValueError(f"expected sink >= 0 and recent >= 1, got sink={self.sink} recent={self.recent}")
        return self

    def clipped(self, max_model_len: int) -> Window:
        """The smallest window with the same visibility for positions below ``max_model_len``."""
        sink = min(self.sink, max_model_len)
        return Window(sink, max(1, min(self.recent, max_model_len - sink)))


def sees_causal(query_position: Array, key_position: Array) -> Array:
    """A token sees itself and everything before it."""
    return key_position <= query_position


def sees_streaming(query_position: Array, key_position: Array, window: Window) -> Array:
    """Token ``p`` sees ``k < sink`` or ``p - recent < k``, and never the future.

    Exact per token, so the result does not depend on how a prompt is cut into chunks.
    Source: DuoAttention (arXiv:2410.10819) with StreamingLLM's sinks (arXiv:2309.17453).
    """
    kept = (key_position < window.sink) | (key_position > query_position - window.recent)
    return kept & (key_position <= query_position)

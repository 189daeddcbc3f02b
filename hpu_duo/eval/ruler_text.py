"""The haystack: filler in any amount, and where needles go."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from hpu_duo.builtin.passkeys import document
from hpu_duo.eval.draw import Draw

_NOISE = "The grass is green and the sky is blue. The sun is warm. We go there and come back again."
_CHUNK = 64


class Filler:
    """Pieces of text, of which a longer haystack begins with those of a shorter one.

    Args:
        kind: "noise" (one remark over and over), "text" (sentences) or "needles" (made by ``piece``).
        seed: of the pieces.
        piece: writes one distracting needle from a stream of choices.
    """

    def __init__(self, kind: str, seed: int, piece: Callable[[Draw], str] | None) -> None:
        self._kind, self._seed, self._piece = kind, seed, piece
        self._made: list[str] = []

    def pieces(self, num: int) -> list[str]:
        """The first ``num`` pieces."""
        while len(self._made) < num:
            self._made += self._more()
        return self._made[:num]

    def _more(self) -> list[str]:
        at = len(self._made)
        if self._kind == "noise":
            return [_NOISE] * _CHUNK
        if self._kind == "text":
            # Counting every text as one token makes the budget a number of sentences.
            return (
                document(lambda text: 1, _CHUNK, 0, 1, self._seed + at).text.replace(". ", ".\n").split("\n")
            )
        assert self._piece is not None, "needles are written by a function"
        return [self._piece(Draw(self._seed, f"needle/{at + i}")) for i in range(_CHUNK)]


def place(needles: Sequence[str], depths: Sequence[float], pieces: Sequence[str]) -> list[str]:
    """The pieces with each needle before the piece at its depth; needles keep their order at equal depth."""
    ends = range(len(pieces) + 1)
    result = list(pieces)
    order = sorted(range(len(needles)), key=lambda i: (depths[i], i))
    for i in reversed(order):
        result.insert(bisect_left(ends, depths[i] * len(pieces)), needles[i])
    return result

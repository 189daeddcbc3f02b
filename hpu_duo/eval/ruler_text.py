"""The haystack: filler in any amount."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import islice

from hpu_duo.builtin.passkeys import sentences
from hpu_duo.builtin.placing import place
from hpu_duo.eval.draw import Draw

_NOISE = "The grass is green and the sky is blue. The sun is warm. We go there and come back again."
_CHUNK = 64


class Filler:
    """Pieces of text; a longer haystack begins with the pieces of a shorter one.

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

    def around(self, needles: Sequence[str], depths: Sequence[float], num: int) -> str:
        """The first ``num`` pieces, with each needle before the piece at its depth."""
        return " ".join(place(needles, depths, self.pieces(num), [1] * num))

    def _more(self) -> list[str]:
        at = len(self._made)
        if self._kind == "noise":
            return [_NOISE] * _CHUNK
        if self._kind == "text":
            return list(islice(sentences(random.Random(self._seed + at)), _CHUNK))
        assert self._piece is not None, "needles are written by a function"
        return [self._piece(Draw(self._seed, f"needle/{at + i}")) for i in range(_CHUNK)]

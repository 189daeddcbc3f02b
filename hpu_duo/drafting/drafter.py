"""The interface of drafters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hpu_duo.request import Request


class Drafter:
    """Guesses the next tokens of requests that decode; a base class, whose drafter never guesses.

    Outputs do not depend on it: a draft is accepted only if it is the token that is sampled there anyway. All
    methods are called between steps, by one thread, so what takes long delays all requests.
    ``request.tokens`` up to ``request.num_tokens`` are prompt and output; nothing of a request may be
    changed.

    Attributes:
        most_by_rows: most drafts of a row for ranges of numbers of rows, ``(first, last, most)``; the engine
            chooses where none has the number of a step.
    """

    most_by_rows: Sequence[tuple[int, int, int]] = ()

    def begin(self, request: Request) -> None:
        """Prepare for a request, before any other call for it."""

    def extend(self, request: Request, tokens: npt.NDArray[np.int32]) -> None:
        """Take the next known tokens of a request: its prompt, piece by piece, then its output.

        Each token comes once, also where a request is preempted and recomputed.
        """

    def propose(self, request: Request, most: int) -> Sequence[int] | npt.NDArray[np.integer]:
        """Return the likely next tokens of a request, at most ``most`` of them, or none.

        Called for decodes that a step has room for, when ``extend`` has had all tokens of the request.
        """
        return ()

    def end(self, request: Request) -> None:
        """Free what belongs to a request that has ended."""

"""One prompt on its way to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpu_duo.sampling import SamplingParams


@dataclass(frozen=True)
class Submission:
    """A prompt, and how to continue it.

    Attributes:
        request_id: its name in the engine, unique among those under way.
        prompt_token_ids, params: as for ``Engine.add_request``.
        score: of the prompt, by ``Engine.rank``; None where it was not asked.
        first_choice: place of its first sample among the choices of the answer; the others follow.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    first_choice: int = 0
    score: float | None = None

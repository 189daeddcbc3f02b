"""One call, checked: its requests to the engine, and its answer to be."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpu_duo.sampling import SamplingParams
from hpu_duo.server.answers import Answer
from hpu_duo.server.planning.scoring import Scoring
from hpu_duo.server.running import Submission


@dataclass(frozen=True)
class Plan:
    """A call that has been checked.

    Attributes:
        answer_id: the ``id`` of the answer.
        model: the name that the model was asked by.
        prompts: token ids of each prompt.
        params: of all of them; None when nothing is to be generated.
        answer: takes the outputs.
        is_streamed: whether it is sent as events.
        user: who asks.
        cache_salt: see ``SamplingParams``.
        texts: gives the prompts as text, for logs that are to have them.
        scoring: of the prompts, before anything is generated; None where nobody asked for it.
    """

    answer_id: str
    model: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams | None
    answer: Answer
    is_streamed: bool
    user: str | None = None
    cache_salt: str | None = None
    texts: Callable[[], Sequence[str]] = tuple
    scoring: Scoring | None = None

    @property
    def num_samples(self) -> int:
        """Samples that the engine has to make."""
        return 0 if self.params is None else self.params.n * len(self.prompts)

    @property
    def submissions(self) -> list[Submission]:
        """Requests to submit. Their names are unique; the answer's id may be of the caller's choice."""
        params = self.params
        if params is None:
            return []
        params, name = replace(params, cache_salt=self.cache_salt), uuid.uuid4().hex
        return [
            Submission(f"{name}-{index}", prompt, params, index * params.n)
            for index, prompt in enumerate(self.prompts)
        ]


def new_answer_id(prefix: str, asked: str | None) -> str:
    """The ``id`` of an answer: the caller's name for it, or a new one."""
    return f"{prefix}-{uuid.uuid4().hex if asked is None else asked}"

"""Two users who always ask for more, and the service that each gets."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from hpu_duo.request import Request
from tests.scheduling.serving import Serving

Prompt = Callable[[str, int], Sequence[int]]


class Backlog:
    """Keeps requests of some users waiting, and counts what each user gets.

    Args:
        most_prompt, most_output: lengths are drawn up to these; 1 or more.
        depth: requests of each user that wait when a step begins; more than there are rows, so that nobody
            has none while a step is planned.
        prompt_of: tokens of a prompt, by user and length.

    Attributes:
        service: of each user at the end of each step: computed tokens of prompts, and outputs for 2 each.
    """

    def __init__(
        self,
        serving: Serving,
        users: Sequence[str],
        seed: int,
        *,
        most_prompt: int,
        most_output: int,
        depth: int = 5,
        prompt_of: Prompt = lambda user, length: [1] * length,
    ) -> None:
        self._serving, self._users, self._depth = serving, users, depth
        self._most_prompt, self._most_output, self._prompt_of = most_prompt, most_output, prompt_of
        self._random = random.Random(seed)
        self._requests: list[Request] = []
        self._had: Counter[str] = Counter()
        self._outputs: Counter[Request] = Counter()
        self._admitted: set[Request] = set()
        self._num_sent = 0
        self.service: dict[str, list[float]] = {user: [] for user in users}

    def run(self, num_steps: int) -> Backlog:
        """Serve so many steps."""
        for _ in range(num_steps):
            self._fill()
            self._serving.step()
            self._count()
        return self

    def widest(self, one: str, other: str) -> float:
        """The largest difference of service in any window of steps."""
        gaps = [a - b for a, b in zip([0.0, *self.service[one]], [0.0, *self.service[other]])]
        return max(gaps) - min(gaps)

    def _fill(self) -> None:
        waiting = Counter(r.params.user for r in self._requests if r.admitted_at is None)
        for user in self._users:
            for _ in range(self._depth - waiting[user]):
                self._num_sent += 1
                prompt = self._prompt_of(user, self._random.randint(1, self._most_prompt))
                self._requests.append(
                    self._serving.add(
                        f"{user}{self._num_sent}",
                        self._random.randint(1, self._most_output),
                        prompt=prompt,
                        user=user,
                    )
                )

    def _count(self) -> None:
        for request in self._requests:
            user = str(request.params.user)
            if request.admitted_at is not None and request not in self._admitted:
                self._admitted.add(request)
                self._had[user] += request.num_prompt_tokens - (request.num_cached_tokens or 0)
            self._had[user] += 2 * (request.num_output_tokens - self._outputs[request])
            self._outputs[request] = request.num_output_tokens
        self._requests = [request for request in self._requests if not request.is_finished]
        for user in self._users:
            self.service[user].append(self._had[user])

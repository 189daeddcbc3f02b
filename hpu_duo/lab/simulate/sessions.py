"""Sessions of a trace or a generator as arrivals of a simulation."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from hpu_duo.lab.simulate.forecast import Forecast
from hpu_duo.lab.traces import Arrival, Session
from hpu_duo.request import Request, TokenLimits
from hpu_duo.sampling import SamplingParams


class SessionArrivals:
    """Requests of sessions: the first comes at its time, a further one a pause after the end of the last.

    A prompt is made when its request comes: with the tokens that its trace says it shares with others, with
    all that its session has said before, and with tokens of its own otherwise. Every request gets as many
    tokens as it asks for.

    Args:
        sessions: in any order.
        max_model_len: tokens that a request may have; all requests of all sessions must fit.
        seed: of the tokens, and of errors.
        forecast: what policies know of outputs.

    Attributes:
        came: time and user of each request that has come, by its id, in order.
    """

    def __init__(
        self,
        sessions: Iterable[Session],
        max_model_len: int,
        seed: int = 0,
        forecast: Forecast | None = None,
    ) -> None:
        self._seed, self._forecast = seed, forecast or Forecast()
        self._sessions: Sequence[Session] = tuple(sessions)
        self._limits, self._prompt_of = TokenLimits(max_model_len), self._forecast.prompts(seed)
        # Time, session and turn; those of the same time in the order of the sessions.
        self._coming = [(each.first.time_s, number, 0) for number, each in enumerate(self._sessions)]
        heapq.heapify(self._coming)
        self._under_way: dict[str, tuple[int, int]] = {}
        self._said: dict[int, np.ndarray] = {}
        self.came: dict[str, tuple[float, str | None]] = {}

    def due(self, now: float) -> list[Request]:
        """Return the requests whose time has come."""
        found: list[Request] = []
        while self._coming and self._coming[0][0] <= now:
            time_s, number, turn = heapq.heappop(self._coming)
            request = self._request(number, turn)
            self.came[request.request_id] = (time_s, self._sessions[number].first.user)
            if turn < len(self._sessions[number].turns):
                self._under_way[request.request_id] = (number, turn)
            found.append(request)
        return found

    def next_time(self) -> float | None:
        """Return when the next request comes, of those that wait for nobody."""
        return self._coming[0][0] if self._coming else None

    def ended(self, request: Request, now: float) -> None:
        """Let the next turn of the request's session come after its pause."""
        if request.request_id not in self._under_way:
            return
        number, turn = self._under_way.pop(request.request_id)
        self._said[number] = request.tokens[: request.num_tokens]
        heapq.heappush(self._coming, (now + self._sessions[number].turns[turn].pause_s, number, turn + 1))

    def _request(self, number: int, turn: int) -> Request:
        session = self._sessions[number]
        # The tokens of a turn follow from its place, whenever it comes.
        place = (turn << 32) | number
        if turn:
            asked = session.turns[turn - 1]
            new = self._prompt_of(Arrival(0.0, asked.num_new_tokens, 1), place)
            prompt, num_output = np.concatenate([self._said.pop(number), new]), asked.num_output_tokens
        else:
            prompt, num_output = self._prompt_of(session.first, place), session.first.num_output_tokens
        expected = self._forecast.expected_tokens(num_output, self._seed, place)
        params = SamplingParams(
            max_tokens=num_output, ignore_eos=True, user=session.first.user, expected_tokens=expected
        )
        request = Request(f"s{number}.{turn}", prompt, params, self._limits)
        request.score = self._forecast.score(prompt, expected)
        return request

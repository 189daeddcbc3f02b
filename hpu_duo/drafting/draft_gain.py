"""Number of drafts that a step should verify, by their expected gain and their cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_RATE = 0.2
"""Weight of the newest draft in a mean."""
_FIRST_CHANCE = 0.5
_FIRST_OF_MODEL = [0.8**place for place in range(1, 32)]
"""Chances of drafts that a model makes, before any is verified."""
_PERIOD, _MAX_AGE = 64, 1024
"""Steps whose times are compared: the same ones for all sizes, since machines have slow spells."""
_DOUBT, _NUM_CERTAIN = 0.3, 8
"""Share by which the time of a longer row may be too long while fewer of its steps are known."""
_MOST_LOSS = 0.005
"""Share of the time of decodes that drafts may lose to find out whether they are accepted."""
_FREE_STEPS = 4
_LEAST_GAIN = 0.1
"""Tokens of a row that a longer row saves and costs at least, over a plain step's."""
_LONGEST_PAUSE = 32


class Acceptance:
    """Exponential means of how often drafts were accepted up to each of their places.

    Args:
        chances: means to begin with, of the places that are known.
    """

    def __init__(self, chances: Sequence[float] = ()) -> None:
        self.chances = list(chances)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Add a draft that was verified."""
        while len(self.chances) < num_drafts:
            self.chances.append(self.chances[-1] if self.chances else _FIRST_CHANCE)
        for place in range(num_drafts):
            self.chances[place] += _RATE * ((place < num_accepted) - self.chances[place])

    def expected(self, num_drafts: int) -> float:
        """Tokens of a draft that are expected to be accepted."""
        known = self.chances[:num_drafts]
        rest = known[-1] if known else _FIRST_CHANCE
        return sum(known) + rest * (num_drafts - len(known))


class StepTimes:
    """Seconds of steps without prompts, by number of rows, tokens of each, and whether a model has drafted.

    They are the least of those of the last 64 steps, or of the last two where these have fewer.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[int, int, bool], deque[tuple[int, float]]] = {}
        self._num_steps = 0

    def add(self, num_rows: int, row_len: int, seconds: float, has_chain: bool = False) -> None:
        """Add a step."""
        self._num_steps += 1
        key = num_rows.bit_length(), row_len, has_chain
        times = self._times.setdefault(key, deque(maxlen=_PERIOD))
        times.append((self._num_steps, seconds))

    def of(self, num_rows: int, row_len: int, has_chain: bool = False) -> float | None:
        """Seconds of such a step; None before two of them are known, and where they are long ago."""
        times = self._times.get((num_rows.bit_length(), row_len, has_chain), ())
        ages = [(self._num_steps - number, seconds) for number, seconds in times]
        known = [seconds for age, seconds in ages if age < _MAX_AGE]
        num_newest = max(2, sum(age < _PERIOD for age, _ in ages))
        return min(known[-num_newest:]) if len(known) > 1 else None

    def least_of(self, num_rows: int, row_len: int, has_chain: bool = False) -> float | None:
        """Seconds of such a step in the best case: less than ``of`` as long as few of them are known."""
        seconds = self.of(num_rows, row_len, has_chain)
        if seconds is None:
            return None
        num_known = len(self._times[num_rows.bit_length(), row_len, has_chain])
        return seconds * (1 - _DOUBT * max(0.0, 1 - num_known / _NUM_CERTAIN))


class DraftLengths:
    """Chooses the tokens of a row in each step: the size with the most expected tokens per second.

    A size whose time is unknown is tried. Sizes that lose are tried now and then, while the estimated loss of
    all steps stays below 0.5 % of their time. A request with drafts that are not worth verifying pauses for
    a growing number of steps.

    Args:
        lens: the sizes, ascending, see ``StepLimits.draft_lens``.
    """

    def __init__(self, lens: Sequence[int]) -> None:
        self._lens, self.times = tuple(lens), StepTimes()
        # Drafts of text (False), and those that a model makes.
        self._all = {False: Acceptance(), True: Acceptance(_FIRST_OF_MODEL)}
        self._of: dict[tuple[object, bool], Acceptance] = {}
        self._pauses: dict[object, list[int]] = {}
        self._loss_s = self._total_s = 0.0
        self._num_tries = 0

    def pauses(self, request: object) -> bool:
        """Whether a request proposes nothing in this step."""
        pause = self._pauses.get(request)
        if pause is None or not pause[0]:
            return False
        pause[0] -= 1
        return True

    def prefers_model(self, request: object, num_of_text: int, num_of_model: int) -> bool:
        """Whether a model's drafts are expected to add more than twice the tokens that a draft of text adds.

        Args:
            num_of_text, num_of_model: tokens of both drafts.
        """
        of_text, of_model = self._chances(request, False), self._chances(request, True)
        return 2 * of_text.expected(num_of_text) < of_model.expected(num_of_model)

    def choose(
        self, num_drafts: Mapping[Any, int], num_rows: int, of_model: Collection[Any] = frozenset()
    ) -> int:
        """Return the tokens of a row of the next step.

        Args:
            num_drafts: length of the draft of each request that has one.
            num_rows: rows of the step.
            of_model: requests whose drafts a model makes.
        """
        shortest, has_chain = self._lens[0], bool(of_model)
        if not num_drafts:
            return shortest
        longest = max(num_drafts.values()) + 1
        last = next((each for each in self._lens if each >= longest), self._lens[-1])
        sizes = [each for each in self._lens if shortest < each <= last]
        plain_s, known = (
            self.times.of(num_rows, shortest),
            {each: self.times.least_of(num_rows, each, has_chain) for each in sizes},
        )
        if plain_s is None:
            return shortest
        unknown = [each for each in sizes if known[each] is None]
        if unknown:
            return unknown[-1]
        best, rate = shortest, num_rows / plain_s
        for each, seconds in known.items():
            assert seconds is not None, "all are known"
            gained = self._expected(num_drafts, of_model, each)
            # Measured times are noisy: what saves next to nothing is not worth a difference of them.
            if gained > _LEAST_GAIN * num_rows and (num_rows + gained) / seconds > rate:
                best, rate = each, (num_rows + gained) / seconds
        if best == shortest:
            if self._num_tries < _FREE_STEPS or self._loss_s < _MOST_LOSS * self._total_s:
                self._num_tries += 1
                return sizes[0]
            for request in num_drafts:
                self._pause(request)
        return best

    def _chances(self, request: object, of_model: bool) -> Acceptance:
        return self._of.get((request, of_model), self._all[of_model])

    def _expected(self, num_drafts: Mapping[Any, int], of_model: Collection[Any], row_len: int) -> float:
        return sum(
            self._chances(request, request in of_model).expected(min(number, row_len - 1))
            for request, number in num_drafts.items()
        )

    def _pause(self, request: object) -> None:
        _, length = self._pauses.get(request, [0, 1])
        self._pauses[request] = [length, min(2 * length, _LONGEST_PAUSE)]

    def verified(self, request: object, num_drafts: int, num_accepted: int, of_model: bool = False) -> None:
        """Note a draft of a request that a step has verified, or that is known to be right or wrong since.

        Args:
            of_model: whether a model made it.
        """
        if (request, of_model) not in self._of:
            self._of[request, of_model] = Acceptance(self._all[of_model].chances)
        self._of[request, of_model].add(num_drafts, num_accepted)
        self._all[of_model].add(num_drafts, num_accepted)
        if num_accepted:
            self._pauses.pop(request, None)

    def ran(
        self, num_rows: int, row_len: int, num_tokens: int, seconds: float, has_chain: bool = False
    ) -> None:
        """Note a step without prompts.

        Args:
            num_tokens: tokens that it has added to all rows.
            has_chain: whether a model has made some of its drafts.
        """
        self.times.add(num_rows, row_len, seconds, has_chain)
        plain_s = self.times.of(num_rows, self._lens[0])
        took_s = self.times.of(num_rows, row_len, has_chain)
        if plain_s is None or took_s is None:
            return
        self._total_s += took_s
        if row_len > self._lens[0]:
            took_s = max(took_s, (1 + _LEAST_GAIN) * plain_s)
        # Savings are no credit for losses.
        self._loss_s = max(0.0, self._loss_s + took_s - plain_s * num_tokens / num_rows)

    def end(self, request: object) -> None:
        """Forget a request."""
        for of_model in (False, True):
            self._of.pop((request, of_model), None)
        self._pauses.pop(request, None)

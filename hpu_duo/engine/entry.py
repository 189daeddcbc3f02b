"""The way of prompts into an engine: named, checked and queued."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from graphs.interrupts import interrupts_deferred
from hpu_duo.engine.intake import Intake, Prompt
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.stepper import Stepper
from hpu_duo.engine.turns import Turns
from hpu_duo.prefix_hold import PrefixHold
from hpu_duo.sampling import SamplingParams


class Entry:
    """Queues the samples of prompts.

    Args:
        intake: makes the samples.
        scheduler: gets their requests.
        stepper: gets their states.
        turns: of the threads of the engine.
    """

    def __init__(self, intake: Intake, scheduler: Scheduler, stepper: Stepper, turns: Turns) -> None:
        self._intake, self._scheduler, self._turns = intake, scheduler, turns
        self._samples, self._deliveries = stepper.samples, stepper.deliveries
        self._num_added = 0

    def add(
        self,
        prompt_token_ids: Prompt,
        each: Sequence[SamplingParams],
        request_id: str | None = None,
        name: str | None = None,
        score: float | None = None,
        context: PrefixHold | None = None,
        opens: PrefixHold | None = None,
    ) -> str:
        """Queue the samples of one prompt, with parameters of their own; returns the request's id.

        Args:
            request_id: default a new one.
            name: of the request in error messages.
            score: see ``Engine.rank``; None asks for it here.
            context, opens: see ``Request``.

        Raises:
            ValueError: see ``Engine.add_request``.
        """
        for params in {id(one): one for one in each}.values():
            self._intake.prepare(params)
        if score is None:
            named = "the prompt" if request_id is None else f"request {request_id!r}"
            score = self._intake.score(prompt_token_ids, each, named if name is None else name)
        with interrupts_deferred(), self._turns:
            public_id = self._free_id() if request_id is None else request_id
            if self._is_in_use(public_id):
                raise ValueError(f"request id {public_id!r} is in use by an unfinished request")
            requests = self._intake.requests(public_id, self._num_added, prompt_token_ids, each, name)
            # Everything that may fail comes before anything changes.
            states = self._intake.states(public_id, requests)
            self._scheduler.holding.sweep()
            for request in requests:
                request.score, request.context, request.opens = score, context, opens
                self._scheduler.check_fits(request)
            for request in requests:
                self._scheduler.add(request)
            self._num_added += 1
            self._samples.add(public_id, states)
        return public_id

    def _is_in_use(self, request_id: str) -> bool:
        return self._samples.is_live(request_id) or self._deliveries.is_expected(request_id)

    def _free_id(self) -> str:
        """Return a name that is not in use, by the number of requests so far."""
        names = (f"request-{number}" for number in count(self._num_added))
        return next(name for name in names if not self._is_in_use(name))

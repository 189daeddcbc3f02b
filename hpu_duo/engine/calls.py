"""Calls that are served to their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from graphs.interrupts import Deferral, interrupts_deferred
from hpu_duo.engine.outputs import Completion, Completions, RequestOutput
from hpu_duo.engine.stepper import Stepper
from hpu_duo.engine.turns import Turns

Add: TypeAlias = Callable[[], str]
"""Adds a request to the engine, and returns its name."""


class Calls:
    """Serves calls: their requests are added, steps run until all have ended, and outputs are collected.

    Several threads may be in calls at a time; the steps of each serve the requests of all. A call that ends
    early, by an error or an interrupt, leaves no request behind.

    Args:
        stepper: runs the steps.
        turns: of the threads of the engine.
        max_num_seqs: samples that may have a row at a time.
    """

    def __init__(self, stepper: Stepper, turns: Turns, max_num_seqs: int) -> None:
        self._stepper, self._turns, self._max_num_seqs = stepper, turns, max_num_seqs
        self._samples, self._deliveries = stepper.samples, stepper.deliveries

    def serve(
        self,
        waiting: deque[Add],
        on_output: Callable[[RequestOutput], None] | None,
        widths: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """Add requests and step until they have ended; returns the samples of each.

        Args:
            waiting: add one request each and return its name; taken out as they are called.
            on_output: called with each output, between steps.
            widths: samples of each request, to add one only when all of them find a row, for then they can
                fork; None adds all at once.
        """
        call = Completions(on_output)
        try:
            while (outputs := self._outputs_of(call, waiting, widths)) is not None:
                call.add(outputs)
        finally:
            with interrupts_deferred(), self._turns:
                for request_id in call:
                    self._stepper.abort(request_id)
                self._deliveries.end(call)
        return call.in_order()

    def _outputs_of(
        self, call: Completions, waiting: deque[Add], widths: Sequence[int] | None
    ) -> list[RequestOutput] | None:
        """Return the new outputs of a call, after a step if there are none; None once all have ended."""
        with interrupts_deferred() as deferral, self._turns:
            self._stepper.check_between_steps()
            while waiting and self._has_rows(None if widths is None else widths[len(call)]):
                request_id = waiting.popleft()()
                self._deliveries.expect(request_id, call)
            if not call.mail:
                if not waiting and not any(map(self._samples.is_live, call)):
                    return None
                self._advance_for(call, deferral)
            return call.take_mail()

    def _advance_for(self, call: Completions, deferral: Deferral) -> None:
        """Run one step; an error that a request of another call may have caused is not raised.

        If it comes again, the requests run one by one, and each call gets the errors of its own requests.
        """
        try:
            self._stepper.advance(deferral)
        except Exception:
            if all(request_id in call for request_id in self._stepper.last_failed):
                raise

    def _has_rows(self, wanted: int | None) -> bool:
        """Whether ``wanted`` more samples find rows now; True if there are no others, and for None."""
        taken = len(self._samples)
        return wanted is None or not taken or taken + wanted <= self._max_num_seqs

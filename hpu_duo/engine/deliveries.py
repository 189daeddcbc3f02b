"""Delivery of outputs to the calls that they belong to."""

from __future__ import annotations

from hpu_duo.engine.outputs import Completions, RequestOutput


class Deliveries:
    """Keeps each output for its caller: for the ``generate`` that it belongs to, or for the next ``step``."""

    def __init__(self) -> None:
        self._calls: dict[str, Completions] = {}
        self._unreported: list[RequestOutput] = []

    def expect(self, request_id: str, call: Completions) -> None:
        """Deliver outputs of a request to a call from now on."""
        call.expect(request_id)
        self._calls[request_id] = call

    def end(self, call: Completions) -> None:
        """Forget a call."""
        for request_id in call:
            del self._calls[request_id]

    def is_expected(self, request_id: str) -> bool:
        """Whether a call that is under way has a request of this name."""
        return request_id in self._calls

    def report(self, output: RequestOutput) -> None:
        """Deliver an output."""
        call = self._calls.get(output.request_id)
        (self._unreported if call is None else call.mail).append(output)

    @property
    def has_unreported(self) -> bool:
        """Whether there are outputs for the next ``step``."""
        return bool(self._unreported)

    def swap(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Return the outputs for ``step``, and keep ``outputs`` in their place."""
        unreported, self._unreported = self._unreported, outputs
        return unreported

    def put_back(self, outputs: list[RequestOutput]) -> None:
        """Keep outputs that could not be returned for the next ``step``."""
        self._unreported = outputs + self._unreported

"""Requests that wait for long, found by the number of steps."""

from __future__ import annotations

from hpu_duo.request import Request


class IdleTimes:
    """Steps since each waiting request was queued, or promoted for the last time.

    Attributes:
        step: number of steps planned so far.
    """

    def __init__(self) -> None:
        self.step = 0
        # In the order of these steps, since each comes to the end when its step is set.
        self._since: dict[Request, int] = {}

    def begin(self, request: Request) -> None:
        """Count steps of a request from now on."""
        self._since.pop(request, None)
        self._since[request] = self.step

    def end(self, request: Request) -> None:
        """Stop counting."""
        self._since.pop(request, None)

    def take_idle(self, num_steps: float) -> list[Request]:
        """Return the requests that have waited for so many steps, and count theirs anew."""
        found = []
        for request, since in self._since.items():
            if self.step - since < num_steps:
                break
            found.append(request)
        for request in found:
            self.begin(request)
        return found

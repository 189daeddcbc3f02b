"""Work that replicas were given of late."""

from __future__ import annotations

from dataclasses import dataclass

from hpu_duo.routing.window_sums import WindowSums


@dataclass(eq=False)
class Charge:
    """Work of one request; seconds, from a time on."""

    at: float
    seconds: float


class WindowLoad:
    """Seconds of work that each replica was given within a window of time; 0 when the window holds none.

    Args:
        window_s: length of the window.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._loads: dict[str, WindowSums] = {}

    def join(self, replica: str, now: float) -> None:
        """Take in a replica, with as much on its account as the one with the least has.

        Without that, a replica that is new would be sent everything until it had as much within the window as
        the others.
        """
        least = min((self.seconds(each, now) for each in self._loads), default=0.0)
        self._loads[replica] = WindowSums()
        if least:
            self.charge(replica, now, least)

    def leave(self, replica: str) -> None:
        """Forget a replica."""
        del self._loads[replica]

    def charge(self, replica: str, now: float, seconds: float) -> Charge:
        """Add work; what is returned can be corrected."""
        self._loads[replica].add(now, seconds)
        return Charge(now, seconds)

    def correct(self, replica: str, charge: Charge, seconds: float) -> None:
        """Replace the seconds of a charge, by 0 if the work was not done."""
        if self._loads[replica].correct(charge.at, seconds - charge.seconds):
            charge.seconds = seconds

    def seconds(self, replica: str, now: float) -> float:
        """Return the work of a replica within the window that ends now."""
        load = self._loads[replica]
        load.drop(now - self._window_s)
        return max(0.0, load.total())

    def num_charges(self, replica: str) -> int:
        """Return how many charges the window held when it was looked at last."""
        return self._loads[replica].num()

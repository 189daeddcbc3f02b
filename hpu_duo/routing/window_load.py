"""Work that replicas were given of late."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class Charge:
    """Work of one request; seconds, from a time on."""

    at: float
    seconds: float


@dataclass(eq=False)
class _Load:
    charges: deque[Charge] = field(default_factory=deque)
    seconds: float = 0.0


class WindowLoad:
    """Seconds of work that each replica was given within a window of time; 0 when the window holds none.

    Args:
        window_s: length of the window.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._loads: dict[str, _Load] = {}

    def join(self, replica: str, now: float) -> None:
        """Take in a replica, with as much on its account as the one with the least has.

        Without that, a replica that is new would be sent everything until it had as much within the window as
        the others.
        """
        least = min((self.seconds(each, now) for each in self._loads), default=0.0)
        self._loads[replica] = _Load()
        if least:
            self.charge(replica, now, least)

    def leave(self, replica: str) -> None:
        """Forget a replica."""
        del self._loads[replica]

    def charge(self, replica: str, now: float, seconds: float) -> Charge:
        """Add work; what is returned can be corrected."""
        load, new = self._loads[replica], Charge(now, seconds)
        load.charges.append(new)
        load.seconds += seconds
        return new

    def correct(self, replica: str, charge: Charge, seconds: float) -> None:
        """Replace the seconds of a charge, by 0 if the work was not done."""
        load = self._loads[replica]
        if load.charges and charge.at >= load.charges[0].at:
            load.seconds += seconds - charge.seconds
            charge.seconds = seconds

    def seconds(self, replica: str, now: float) -> float:
        """Return the work of a replica within the window that ends now."""
        load = self._loads[replica]
        while load.charges and load.charges[0].at <= now - self._window_s:
            load.seconds -= load.charges.popleft().seconds
        if not load.charges:
            load.seconds = 0.0  # what rounding has left
        return max(0.0, load.seconds)

    def num_charges(self, replica: str) -> int:
        """Return how many charges the window held when it was looked at last."""
        return len(self._loads[replica].charges)

"""Scheduling policies: who runs first where not everybody can run."""

from collections.abc import Callable

from hpu_duo.scheduling.arrivals import ArrivalOrder
from hpu_duo.scheduling.fcfs import FirstComeFirstServed
from hpu_duo.scheduling.policy import SchedulingPolicy

__all__ = ["POLICIES", "ArrivalOrder", "FirstComeFirstServed", "SchedulingPolicy", "make_policy"]

POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
}
"""Policies by name; a scheduler gets one of its own, because it may count what it has charged."""


def make_policy(name: str) -> SchedulingPolicy:
    """Make the policy of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in POLICIES:
        raise ValueError(f"expected scheduling_policy to be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]()

"""Generators of requests, a small class each; the same fields, seed included, give the same requests."""

from collections.abc import Callable
from functools import partial

from hpu_duo.lab.traces.workloads.chats import Agents, Chats, Documents
from hpu_duo.lab.traces.workloads.workload import Bursts, Flood, Poisson, Workload, with_shorter
from hpu_duo.option_spec import call_with_options

__all__ = [
    "WORKLOADS",
    "Agents",
    "Bursts",
    "Chats",
    "Documents",
    "Flood",
    "Poisson",
    "Workload",
    "make_workload",
    "with_shorter",
]

WORKLOADS: dict[str, Callable[..., Workload]] = {
    "poisson": Poisson,
    "bursts": Bursts,
    "chats": Chats,
    "agents": Agents,
    "documents": Documents,
    "flood": Flood,
}
"""Generators by name."""


def make_workload(text: str, seed: int = 0) -> Workload:
    """Make the generator of a name, with options behind it, such as ``chats:turns=8,outputs=300~0.8``.

    Args:
        seed: unless the options have one.

    Raises:
        ValueError: there is none of this name, or it has no such option or not with this value.
    """
    return call_with_options(
        "workload", text, {name: partial(kind, seed=seed) for name, kind in WORKLOADS.items()}
    )

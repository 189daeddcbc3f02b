"""The contract of generators, and what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Protocol

from hpu_duo.lab.traces.lengths import Lengths
from hpu_duo.lab.traces.session import Session


class Workload(Protocol):
    """A generator: a frozen dataclass with a default for each field, among them ``seed``."""

    def sessions(self, num_requests: int) -> list[Session]:
        """Draw sessions with ``num_requests`` requests together, in order of time; one may be cut short."""
        ...


def first_requests(sessions: Sequence[Session], num_requests: int) -> list[Session]:
    """Cut sessions to ``num_requests`` requests, the earliest sessions first.

    Returns:
        As many requests, or all if there are fewer; in order of time.
    """
    kept: list[Session] = []
    left = num_requests
    for session in sorted(sessions, key=lambda each: each.first.time_s):
        if not left:
            break
        kept.append(Session(session.first, session.turns[: left - 1]))
        left -= kept[-1].num_requests
    return kept


def check_fields(workload: Any, **least: float) -> None:
    """Check that fields are finite and not below a least value; ValueError names the first that is."""
    for name, bound in least.items():
        if not bound <= getattr(workload, name) < float("inf"):
            raise ValueError(f"expected {name} of at least {bound:g}, got {getattr(workload, name)}")


def with_shorter(text: str, workload: Any, num_tokens: int) -> str:
    """The text of a generator, with lengths whose medians are ``num_tokens`` together.

    Args:
        text: name and options of the generator; all but its lengths stay.
        workload: the generator of this text.
    """
    found = {each.name: getattr(workload, each.name) for each in fields(workload)}
    lengths = {
        name: value if isinstance(value, Lengths) else Lengths(value)
        for name, value in found.items()
        if isinstance(value, Lengths) or (name.endswith("_len") and value)
    }
    factor = num_tokens / sum(each.median for each in lengths.values())
    name, _, rest = text.partition(":")
    options = [each for each in rest.split(",") if each and each.partition("=")[0] not in lengths]
    for option, each in lengths.items():
        spread = f"~{each.sigma:g}" if each.sigma else ""
        options.append(f"{option}={max(1, round(each.median * factor))}{spread}")
    return f"{name}:{','.join(options)}"

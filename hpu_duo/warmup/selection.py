"""Select the buckets of a table to warm up, and check that the table is complete."""

from __future__ import annotations

from collections.abc import Collection

from graphs import BatchShape, BucketTable, Miss, Phase, StepLimits


def parse_phases(text: str) -> tuple[Phase, ...]:
    """Read phase strings that are separated by commas, such as ``--u,cs-``, or their short forms ``u,cs``.

    Raises:
        ValueError: one of them is not a phase, or there is none.
    """
    phases: dict[Phase, None] = {}
    for part in text.split(","):
        try:
            phases[Phase.parse(part.strip())] = None
        except ValueError as error:
            raise ValueError(f"phases {text!r}: {error}") from error
    return tuple(phases)


def select(table: BucketTable, phases: Collection[Phase] | None) -> tuple[BatchShape, ...]:
    """Return the buckets of some phases, or of all, the most expensive first.

    The largest comes first so that a lack of memory shows at once, and so that smaller graphs find
    allocations that they can use.

    Raises:
        ValueError: the table has no bucket of one of the phases.
    """
    largest_first = tuple(reversed(table.by_cost))
    if phases is None:
        return largest_first
    present = {bucket.phase for bucket in table}
    for phase in phases:
        if phase not in present:
            listed = ", ".join(map(str, sorted(present))) or "no buckets"
            raise ValueError(f"expected phases that the table has, which are {listed}, got {phase}")
    return tuple(bucket for bucket in largest_first if bucket.phase in phases)


def check_holds_everything(table: BucketTable, limits: StepLimits) -> None:
    """Refuse a table that lacks a bucket for a shape that the scheduler can produce.

    The largest shape of a phase holds every other shape of that phase, so a table has a bucket for every
    reachable shape exactly if it has one for the largest of each reachable phase.

    Raises:
        ValueError: it lacks one; the message names the shapes.
    """
    missing = [
        str(found.shape)
        for found in (table.fit(limits.largest_of(phase)) for phase in limits.reachable_phases)
        if isinstance(found, Miss)
    ]
    if missing:
        raise ValueError(
            f"the table lacks reachable shapes: within these limits steps can be as large as "
            f"{', '.join(missing)}, and no bucket holds {'it' if len(missing) == 1 else 'them'}; "
            "lower the limits, add buckets, or let misses run with on_miss 'capture' or 'eager'"
        )

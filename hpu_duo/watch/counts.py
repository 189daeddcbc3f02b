"""Counts of compilations up to a moment, and between two moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tally:
    """Counts of one source, by name.

    Attributes:
        graphs: first compilations and captures.
        recompiles: later compilations of the same code, and captures after warm-up had ended.
        fallbacks: operators that ran on the host's CPU for want of a device kernel.
        misses: shapes that no bucket held.
    """

    graphs: Mapping[str, int] = field(default_factory=dict)
    recompiles: Mapping[str, int] = field(default_factory=dict)
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    misses: int = 0

    def __sub__(self, earlier: Tally) -> Tally:
        """Return the counts since ``earlier``, a tally of the same source."""
        return Tally(
            _less(self.graphs, earlier.graphs),
            _less(self.recompiles, earlier.recompiles),
            _less(self.fallbacks, earlier.fallbacks),
            self.misses - earlier.misses,
        )


def _less(later: Mapping[str, int], earlier: Mapping[str, int]) -> dict[str, int]:
    counts = {name: count - earlier.get(name, 0) for name, count in later.items()}
    return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True)
class Counts:
    """Counts of all sources.

    Sources count the same events at different levels: one captured bucket may be one graph of the cache,
    twelve of the compiler and forty of the device. So a total is not a sum, but the largest count of any
    source.

    Attributes:
        tallies: by the name of the source.
    """

    tallies: Mapping[str, Tally]

    def __sub__(self, earlier: Counts) -> Counts:
        """Return the counts since ``earlier``."""
        before = earlier.tallies
        return Counts({name: tally - before.get(name, Tally()) for name, tally in self.tallies.items()})

    @property
    def num_graphs(self) -> int:
        """Graphs compiled or captured for the first time."""
        return self._most(lambda tally: sum(tally.graphs.values()))

    @property
    def num_recompiles(self) -> int:
        """Graphs compiled again, or captured after warm-up."""
        return self._most(lambda tally: sum(tally.recompiles.values()))

    @property
    def num_fallbacks(self) -> int:
        """Operators run on the host's CPU."""
        return self._most(lambda tally: sum(tally.fallbacks.values()))

    @property
    def findings(self) -> tuple[str, ...]:
        """Compilations and fallbacks, one line each. A miss alone compiles nothing."""
        return tuple(self._findings())

    def _findings(self) -> Iterator[str]:
        for source, tally in self.tallies.items():
            for verb, counts in (
                ("compiled", tally.graphs),
                ("recompiled", tally.recompiles),
                ("ran on the host's CPU:", tally.fallbacks),
            ):
                for name, count in counts.items():
                    yield f"{source} {verb} {name}" + (f" {count} times" if count > 1 else "")

    def _most(self, of: Callable[[Tally], int]) -> int:
        return max(map(of, self.tallies.values()), default=0)

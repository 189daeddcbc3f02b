"""Counts of what the simulated device does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from hpu_duo.lab.rules import Rule
from hpu_duo.lab.sim.report import SimReport, StepTraffic


class Watch:
    """Counts from the moment it is made until it is detached; see ``watch``."""

    def __init__(self) -> None:
        self._steps: list[StepTraffic] = []
        self._between = StepTraffic()
        self._now = StepTraffic()
        self._graph_runs: Counter[str] = Counter()
        self._operators = 0
        self._excused: Counter[Rule] = Counter()

    def report(self) -> SimReport:
        """A snapshot of the counts. Counts after the last step are outside of steps."""
        return SimReport(
            tuple(self._steps),
            _sum(self._between, self._now),
            MappingProxyType(dict(self._graph_runs)),
            self._operators,
            MappingProxyType(dict(self._excused)),
        )

    def add(self, **counts: int) -> None:
        """Count traffic of the step under way; names are those of ``StepTraffic``."""
        self._now = _sum(self._now, StepTraffic(**counts))

    def run_graph(self, label: str) -> None:
        """Count one run of a graph."""
        self._graph_runs[label] += 1

    def launch(self) -> None:
        """Count one operator."""
        self._operators += 1

    def excuse(self, rule: Rule) -> None:
        """Count a broken rule that is allowed."""
        self._excused[rule] += 1

    def begin_step(self, *, goes_on: bool = False) -> None:
        """Begin a step, or go on with the last one: counts since the last step are outside of steps."""
        self._between = _sum(self._between, self._now)
        self._now = self._steps.pop() if goes_on and self._steps else StepTraffic()

    def end_step(self) -> None:
        """Close the step under way."""
        self._steps.append(self._now)
        self._now = StepTraffic()


@dataclass
class Journal:
    """Operators that the device has compiled outside of graphs, and its watches.

    Attributes:
        recipes: number of runs of each operator outside of graphs.
        graphs: number of captures of each graph, by label.
        watches: the current watches.
    """

    recipes: set[int] = field(default_factory=set)
    graphs: Counter[str] = field(default_factory=Counter)
    watches: list[Watch] = field(default_factory=list)

    def launch_alone(self, recipe: int) -> None:
        """Note an operator outside of graphs."""
        is_new = recipe not in self.recipes
        self.recipes.add(recipe)
        for watch in self.watches:
            watch.launch()
            if is_new:
                watch.add(new_recipes=1)

    def capture(self, label: str) -> None:
        """Note a captured graph."""
        self.graphs[label] += 1
        self.count(new_graphs=1)

    def launch_inside(self) -> None:
        """Note an operator of a graph."""
        for watch in self.watches:
            watch.launch()

    def count(self, **counts: int) -> None:
        """Note traffic; names are those of ``StepTraffic``."""
        for watch in self.watches:
            watch.add(**counts)

    @contextmanager
    def attached(self) -> Iterator[Watch]:
        """A new watch for the duration of the context."""
        watch = Watch()
        self.watches.append(watch)
        try:
            yield watch
        finally:
            self.watches.remove(watch)


def _sum(a: StepTraffic, b: StepTraffic) -> StepTraffic:
    return replace(a, **{name: getattr(a, name) + count for name, count in vars(b).items() if count})

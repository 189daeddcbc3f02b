"""Report of a watch of the simulated device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpu_duo.lab.rules import Rule

if TYPE_CHECKING:
    from rich.console import RenderableType

NOT_PROVEN = (
    "Simulated on CPU. This shows that steps obey the rules above and compute the right numbers. It does "
    "not show that Synapse compiles them, nor speed, nor device memory; nothing here ran on a Gaudi."
)


@dataclass(frozen=True)
class StepTraffic:
    """Traffic of one step between host and device.

    Attributes:
        h2d_copies, h2d_bytes: host to device.
        d2h_reads, d2h_bytes: device to host; the host waits for each of them.
        aside_copies, aside_bytes: in either direction on a stream of copies; nothing waits for them.
        new_graphs, new_recipes: captured in this step, and operators run alone for the first time.
    """

    h2d_copies: int = 0
    h2d_bytes: int = 0
    d2h_reads: int = 0
    d2h_bytes: int = 0
    aside_copies: int = 0
    aside_bytes: int = 0
    new_graphs: int = 0
    new_recipes: int = 0


@dataclass(frozen=True)
class SimReport:
    """Counts of one watch; print it with rich, or as text.

    A *graph* is a captured step: a fixed sequence of operators with their shapes, strides, dtypes and
    scalars. A *recipe* is one operator that ran outside of any graph, with its shapes, strides, dtypes
    and scalars. On a device, each new one is a compilation.

    Attributes:
        steps: traffic of each step, in order.
        between: traffic outside of steps, in warm-up for example.
        graph_runs: runs of each captured graph by bucket.
        operators: operators launched, inside and outside of graphs.
        excused: numbers of times that each allowed rule was broken.
    """

    steps: tuple[StepTraffic, ...]
    between: StepTraffic
    graph_runs: Mapping[str, int]
    operators: int
    excused: Mapping[Rule, int]

    @property
    def new_graphs(self) -> int:
        """Graphs captured while watching."""
        return self.between.new_graphs + sum(step.new_graphs for step in self.steps)

    @property
    def new_recipes(self) -> int:
        """Operators outside of graphs that ran for the first time while watching."""
        return self.between.new_recipes + sum(step.new_recipes for step in self.steps)

    @property
    def max_reads(self) -> int:
        """Most device-to-host reads of one step."""
        return max((step.d2h_reads for step in self.steps), default=0)

    @property
    def max_h2d_bytes(self) -> int:
        """Most bytes that one step copied to the device."""
        return max((step.h2d_bytes for step in self.steps), default=0)

    @property
    def max_d2h_bytes(self) -> int:
        """Most bytes that one step read back."""
        return max((step.d2h_bytes for step in self.steps), default=0)

    def lines(self) -> list[tuple[str, str]]:
        """Names of the counts, and the counts as text."""
        num = max(1, len(self.steps))
        h2d = sum(step.h2d_bytes for step in self.steps)
        d2h = sum(step.d2h_bytes for step in self.steps)
        copies = max((step.h2d_copies for step in self.steps), default=0)
        excused = ", ".join(f"{rule.value} {count}x" for rule, count in self.excused.items())
        return [
            ("steps", f"{len(self.steps)}"),
            ("graphs captured", f"{self.new_graphs}"),
            ("graphs run", f"{len(self.graph_runs)} different, {sum(self.graph_runs.values())} times"),
            ("operators launched", f"{self.operators}"),
            ("new recipes outside graphs", f"{self.new_recipes}"),
            (
                "host to device",
                f"{h2d / num:.0f} bytes a step, at most {self.max_h2d_bytes} in {copies} copies",
            ),
            ("device to host", f"{d2h / num:.0f} bytes a step, at most {self.max_d2h_bytes}"),
            (
                "copies on streams",
                f"{sum(step.aside_copies for step in (*self.steps, self.between))} of "
                f"{sum(step.aside_bytes for step in (*self.steps, self.between))} bytes",
            ),
            ("host waits", f"at most {self.max_reads} in a step"),
            ("rules broken", excused or "none"),
        ]

    def __str__(self) -> str:
        return "\n".join([*(f"{what}: {count}" for what, count in self.lines()), NOT_PROVEN])

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table("simulated HPU", "", box=None, padding=(0, 2, 0, 0))
        for line in self.lines():
            table.add_row(*line)
        return Group(table, Text(NOT_PROVEN, style="dim"))

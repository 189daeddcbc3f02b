"""Options of ``hpu-duo plan``, in groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpu_duo.cli.arguments.options import Only
from hpu_duo.cli.terminal.drawing import check_drawing
from hpu_duo.config.overrides import EngineOverrides
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from graphs import BatchShape
    from graphs.planner import GraphBudget, Traffic

_BUDGET = "Budget"
_OUTPUT = "Output"
_GIB = 1 << 30
STRATEGIES = ("planned", "thinned", "upstream-unified", "exponential", "linear", "padding-aware")


PlannedLimits = Annotated[
    EngineOverrides,
    Only(
        *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_chunk_rows"),
        *("block_size", "decode_len", "trim_chunks"),
    ),
]
"""Limits of the steps that a table is planned for."""


@dataclass(frozen=True)
class BudgetOptions:
    """Bounds on the cost of a table."""

    graphs_budget: Annotated[
        int, typer.Option(help="Most shapes to capture, when planned.", rich_help_panel=_BUDGET)
    ] = 64
    max_seconds: Annotated[
        float | None,
        typer.Option(help="Most time to capture them in.", show_default="no limit", rich_help_panel=_BUDGET),
    ] = None
    seconds_per_graph: Annotated[
        float,
        typer.Option(
            help="What one graph takes of --max-seconds; public figures for Gaudi are 0.7 to 14.",
            rich_help_panel=_BUDGET,
        ),
    ] = 14.0
    max_gib: Annotated[
        float | None,
        typer.Option(
            help="Most device memory for graphs, if each keeps intermediates of its own.",
            show_default="no limit",
            rich_help_panel=_BUDGET,
        ),
    ] = None

    def in_time(self) -> GraphBudget:
        """The budget without its memory; ValueError for a bound that leaves nothing."""
        from graphs.planner import GraphBudget

        return GraphBudget(
            self.graphs_budget,
            seconds=self.max_seconds,
            seconds_per_graph=None if self.max_seconds is None else self.seconds_per_graph,
        )

    def budget(self, bytes_of: Callable[[], Callable[[BatchShape], float]]) -> GraphBudget:
        """The whole budget.

        Args:
            bytes_of: gives the bytes that a graph keeps; called only if memory is bounded.

        Raises:
            ValueError: a bound leaves nothing.
        """
        in_time = self.in_time()
        if self.max_gib is None:
            return in_time
        return replace(in_time, memory_bytes=self.max_gib * _GIB, bytes_of=bytes_of())


@dataclass(frozen=True)
class OutputOptions:
    """Files to write."""

    png: Annotated[
        Path | None,
        typer.Option(
            help="Also draw what fits and how fast it would be; needs matplotlib.",
            show_default="no picture",
            rich_help_panel=_OUTPUT,
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the table, to load it with.", rich_help_panel=_OUTPUT),
    ] = None
    gaudi_out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write it as VLLM_BUCKETING_FROM_FILE too.", rich_help_panel=_OUTPUT
        ),
    ] = None

    @property
    def takes_table(self) -> bool:
        """Whether the table is written to a file."""
        return self.out is not None or self.gaudi_out is not None

    def check(self) -> None:
        """Raise ValueError unless every file can be written."""
        for name, file in (("--out", self.out), ("--gaudi-out", self.gaudi_out)):
            if file is not None:
                check_file(name, file)
        if self.png is not None:
            check_drawing(self.png)


@dataclass(frozen=True)
class TableOptions:
    """Strategy that chooses the table, and the traffic that it is chosen for."""

    from_shapes: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Shapes that --record-shapes wrote; repeat for several.",
            show_default="a stated guess about traffic",
        ),
    ] = None
    strategy: Annotated[str, typer.Option(help=f"One of {', '.join(STRATEGIES)}.")] = "planned"
    compare: Annotated[bool, typer.Option("--compare", help="Show all strategies side by side.")] = False

    @property
    def names(self) -> tuple[str, ...]:
        """Strategies to show, the chosen one first."""
        return tuple(dict.fromkeys((self.strategy, *(STRATEGIES if self.compare else ()))))

    def check(self, trims_chunks: bool) -> None:
        """Raise ValueError for an unknown strategy, or for prompts to trim where that cannot be tried."""
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"expected --strategy to be one of {', '.join(STRATEGIES)}, got {self.strategy!r}"
            )
        if trims_chunks and self.from_shapes:
            raise ValueError(
                "expected --trim-chunks without --from-shapes: recorded steps are as long as they were"
            )
        if trims_chunks and self.compare:
            raise ValueError(
                "expected --trim-chunks without --compare: some strategies make too many shapes to trim to"
            )

    def recorded(self) -> Traffic | None:
        """The recorded traffic; None without a recording.

        Raises:
            ValueError: a file cannot be read, or is no recording.
        """
        from graphs.bucket_file import read_shapes

        return read_shapes(*self.from_shapes) if self.from_shapes else None

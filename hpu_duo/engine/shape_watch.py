"""Shapes of steps, sampled; and a notice when traffic is not what the bucket table was planned for."""

from __future__ import annotations

import logging
import os
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graphs import BatchShape, BucketTable, StepLimits
from graphs.planner.levels import price, to_levels
from graphs.recording import write_shapes
from graphs.reservoir import ShapeReservoir

_log = logging.getLogger(__name__)

WINDOW = 2048
"""Steps that are judged together."""

_TIMES, _MORE = 2.0, 0.1


@dataclass(frozen=True)
class Drift:
    """Padding far beyond what the bucket table was planned for.

    Attributes:
        promised, seen: mean cost of padded steps over that of exact ones, minus 1: of the traffic that the
            table was planned for, and of a window of steps.
        num_steps: of the window.
        command: plans another table from the shapes of recent steps.
    """

    promised: float
    seen: float
    num_steps: int
    command: str

    def __str__(self) -> str:
        return (
            f"the last {self.num_steps:,} steps pad {self.seen:.0%}, and their bucket table promises "
            f"{self.promised:.0%}: it was planned for other traffic. To plan for this one: {self.command}"
        )


@dataclass(frozen=True)
class Replanning:
    """The command that plans a table anew.

    Attributes:
        model: directory of the model.
        limits: of the engine.
    """

    model: str
    limits: StepLimits

    def command(self, num_graphs: int, recording: Path) -> str:
        """The command line, for a table of as many graphs and the shapes in a file."""
        limits = self.limits
        options = {
            "--model": self.model,
            "--max-num-seqs": limits.max_num_seqs,
            "--max-num-batched-tokens": limits.max_num_batched_tokens,
            "--max-model-len": limits.max_model_len,
            "--max-chunk-rows": limits.max_chunk_rows,
            "--decode-len": limits.decode_len,
            "--block-size": limits.block_size,
            "--num-blocks": limits.num_blocks,
            "--graphs-budget": num_graphs,
            "--from-shapes": recording,
            "--out": "table.txt",
        }
        words = (word for option in options.items() for word in map(str, option))
        return shlex.join(["hpu-duo", "plan", *words])


class ShapeWatch:
    """Keeps a bounded sample of the shapes of all steps, and says once when they pad far more than promised.

    Args:
        table: the table that steps run in now; it promises nothing where nobody planned it.
        replanning: the command that plans another one.
        num_judged: steps that are judged together.

    Attributes:
        num_judged: as given; may be changed before the first step.
        reservoir: the sample.
        recording: file that all shapes are written to; None writes the sample to a temporary file when there
            is something to tell.
        drift: what was reported; None as long as there was nothing.
    """

    def __init__(
        self,
        table: Callable[[], BucketTable],
        replanning: Replanning,
        num_judged: int = WINDOW,
    ) -> None:
        self.reservoir = ShapeReservoir()
        self.recording: Path | None = None
        self.drift: Drift | None = None
        self._table, self._replanning = table, replanning
        self.num_judged = num_judged
        self._window: list[tuple[BatchShape, BatchShape]] = []

    def add(self, shape: BatchShape, bucket: BatchShape) -> None:
        """Take note of a step, and of what it was padded to."""
        self.reservoir.add(shape)
        if self.drift is None:
            self._window.append((shape, bucket))
            if len(self._window) == self.num_judged:
                window, self._window = self._window, []
                self._judge(window)

    def _judge(self, window: list[tuple[BatchShape, BatchShape]]) -> None:
        table = self._table()
        promise, cost = table.promise, table.cost
        if promise is None or not promise.is_by(cost):
            return
        exact, padded = (price(cost, to_levels(shapes)).sum() for shapes in zip(*window))
        seen = float(padded / exact) - 1
        if seen > _TIMES * promise.padding + _MORE:
            command = self._replanning.command(len(table), self.recording or self._write())
            self.drift = Drift(promise.padding, seen, len(window), command)
            _log.warning("%s", self.drift)

    def _write(self) -> Path:
        descriptor, name = tempfile.mkstemp(prefix="hpu-duo-shapes-", suffix=".jsonl")
        os.close(descriptor)
        write_shapes(name, self.reservoir.counts())
        return Path(name)

"""Agents that call tools in a loop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpu_duo.lab.traces.arrival import Arrival
from hpu_duo.lab.traces.lengths import Lengths
from hpu_duo.lab.traces.rate import Rate
from hpu_duo.lab.traces.session import Session, Turn
from hpu_duo.lab.traces.workloads.workload import check_fields, first_requests


@dataclass(frozen=True)
class Agents:
    """Tasks that agents of a few kinds work on: short outputs, long results of tools, hardly a pause.

    Agents of a kind share their instructions and descriptions of tools. Each step's prompt is all that was
    said before and the result of the tool that was called.

    Attributes:
        per_s: tasks that begin, per second.
        steps: requests of a task on average; their number is geometric.
        num_kinds, instructions_len: different instructions, and their tokens.
        tasks, results, outputs: lengths of the task, of a tool's result, and of a call.
        tool_s: seconds that a tool takes on average; exponential.
        seed: other seeds give other tasks.
    """

    per_s: float = 0.1
    steps: float = 12.0
    num_kinds: int = 3
    instructions_len: int = 3000
    tasks: Lengths = Lengths(200, 0.6)
    results: Lengths = Lengths(400, 1.2)
    outputs: Lengths = Lengths(60, 0.6)
    tool_s: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, steps=1, num_kinds=1, instructions_len=1, tool_s=0, seed=0)
        Rate(self.per_s)  # refuses what is out of range

    def sessions(self, num_requests: int) -> list[Session]:
        """Draw tasks with ``num_requests`` requests together."""
        rng = np.random.default_rng(self.seed)
        times = Rate(self.per_s).times(num_requests, rng).tolist()
        return first_requests([self._task(time, rng) for time in times], num_requests)

    def _task(self, time_s: float, rng: np.random.Generator) -> Session:
        num = int(rng.geometric(1 / self.steps))
        kind, (task,) = int(rng.integers(self.num_kinds)), self.tasks.draw(1, rng)
        results, outputs = self.results.draw(num, rng), self.outputs.draw(num, rng)
        pauses = rng.exponential(self.tool_s, num).tolist()
        first = Arrival(
            time_s,
            self.instructions_len + task,
            outputs[0],
            block_ids=(kind,),
            block_size=self.instructions_len,
            user=f"agent {kind}",
        )
        return Session(first, tuple(map(Turn, pauses[1:], results[1:], outputs[1:])))

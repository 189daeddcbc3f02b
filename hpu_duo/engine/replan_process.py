"""A process that plans another table: reads a ``ReplanTask`` and writes a ``Replan`` as JSON.

    python -m hpu_duo.engine.replan_process < ARGUMENTS > RESULT

It is started by an engine, whose threads would wait for a search in the same process.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from graphs.planner.replan import ReplanTask, replan
from hpu_duo.device.plain import decode, encode

_NICENESS = 10


def encode_task(task: ReplanTask) -> bytearray:
    """Write a task, with the module of its cost function, which the process has to import.

    Raises:
        TypeError: the cost function is not plain, see ``hpu_duo.device.plain``.
    """
    return encode((type(task.table.cost).__module__, bytes(encode(task))))


def decode_task(data: bytes) -> ReplanTask:
    """Read what ``encode_task`` wrote.

    Raises:
        ValueError: it is something else.
    """
    module, fields = decode(data)
    import_module(module)
    task = decode(fields)
    if not isinstance(task, ReplanTask):
        raise ValueError(f"expected a ReplanTask, got {type(task).__name__}")
    return task


def main() -> None:
    """Plan, at a lower priority than the engine's."""
    os.nice(_NICENESS)
    task = decode_task(sys.stdin.buffer.read())
    print(replan(task.table, task.limits, task.traffic).to_json())


if __name__ == "__main__":
    main()

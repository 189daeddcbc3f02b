"""A process that plans another table: reads a pickled ``ReplanTask`` and writes a ``Replan`` as JSON.

    python -m graphs.planner < ARGUMENTS > RESULT

It is started by an engine, whose threads would wait for a search in the same process.
"""

from __future__ import annotations

import os
import pickle
import sys

from graphs.planner.replan import ReplanTask, replan

_NICENESS = 10


def main() -> None:
    """Plan, at a lower priority than the engine's."""
    os.nice(_NICENESS)
    task = pickle.load(sys.stdin.buffer)
    assert isinstance(task, ReplanTask)
    print(replan(task.table, task.limits, task.traffic).to_json())


if __name__ == "__main__":
    main()

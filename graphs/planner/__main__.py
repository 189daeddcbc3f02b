"""A process that plans another table: reads a pickled table, limits and traffic, and writes a ``Replan``.

    python -m graphs.planner < ARGUMENTS > RESULT

It is started by an engine, whose threads would wait for a search in the same process.
"""

from __future__ import annotations

import os
import pickle
import sys

from graphs.planner.replan import replan

_NICENESS = 10


def main() -> None:
    """Plan, at a lower priority than the engine's."""
    os.nice(_NICENESS)
    table, limits, traffic = pickle.load(sys.stdin.buffer)
    pickle.dump(replan(table, limits, traffic), sys.stdout.buffer)


if __name__ == "__main__":
    main()

"""``python -m graphs.warmup``: the same as ``hpu-duo warmup``.

This package does not depend on the runtime that warms buckets up: the command is looked up among installed
entry points.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

_COMMAND = "hpu-duo"


def main() -> None:
    """Run the command with this process's arguments.

    Raises:
        SystemExit: the command has ended, or is not installed.
    """
    found = tuple(entry_points(group="console_scripts", name=_COMMAND))
    if not found:
        sys.exit(f"expected the command {_COMMAND} to be installed, which warms up the buckets that it runs")
    sys.argv = [_COMMAND, "warmup", *sys.argv[1:]]
    found[0].load()()


if __name__ == "__main__":
    main()

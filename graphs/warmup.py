"""``python -m graphs.warmup``: the same as ``hpu-duo warmup``.

Buckets can be warmed up only by what runs them, and this package does not know who that is: the command is
found by its name when it is asked for.
"""

from __future__ import annotations

import sys
from importlib import import_module

_COMMANDS = "hpu_duo.cli.app"


def main() -> None:
    """Run the command with this process's arguments."""
    import_module(_COMMANDS).app(["warmup", *sys.argv[1:]], prog_name="hpu-duo")


if __name__ == "__main__":
    main()

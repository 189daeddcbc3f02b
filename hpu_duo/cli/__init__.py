"""The command line: ``hpu-duo`` and its commands.

Nothing here imports torch before a command needs it, so help and usage errors come at once.
"""

from hpu_duo.cli.app import main

__all__ = ["main"]

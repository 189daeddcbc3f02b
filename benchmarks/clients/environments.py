"""Virtual environments, one for each client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.clients.client import Client

_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
_DONE = "installed"


def make_environment(client: Client, folder: Path) -> Path:
    """Install a client, unless it is there already.

    Args:
        folder: of all environments.

    Returns:
        Its interpreter.
    """
    place = folder / client.name
    python = place / "bin" / "python"
    if not (place / _DONE).exists():
        print(f"installing {client.name}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "-c", _CONSTRAINTS, *client.packages], check=True
        )
        if client.unwanted:
            subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *client.unwanted], check=True)
        (place / _DONE).touch()
    return python

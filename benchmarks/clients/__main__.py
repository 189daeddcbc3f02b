"""Command line: see the package."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.clients.client import CLIENTS, Client
from benchmarks.clients.environments import make_environment
from benchmarks.serving import serving

_CHECKS = Path(__file__).parent / "checks"
_SERVER = (
    *("--max-model-len", "512", "--max-num-seqs", "32", "--max-choices", "16"),
    *("--tool-call-parser", "hermes"),
)
_TIMEOUT_S = 900


def check(client: Client, environments: Path) -> dict[str, Any]:
    """Run a client against a server of its own.

    Returns:
        Versions and what was seen, and with ``error`` the end of its output if it failed.
    """
    python = make_environment(client, environments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(_SERVER, folder / "server.log") as server:
            command = [python, _CHECKS / f"check_{client.name}.py", server.url, folder, sys.executable]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
            if ran.returncode:
                return {"error": (ran.stdout + ran.stderr)[-6000:]}
            found = dict(json.loads(ran.stdout.splitlines()[-1]))
        code = server.process.returncode
        if code or "Traceback" in server.log.read_text(encoding="utf-8"):
            found["error"] = f"server: exit code {code}: {server.log.read_text(encoding='utf-8')[-3000:]}"
        return found


def lines_of(client: Client, found: dict[str, Any]) -> list[str]:
    """Lines of markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in found.get("versions", {}).items())
    lines = [f"## {client.name.replace('_', '-')}", "", f"{versions}.", ""]
    if client.unwanted:
        lines += [f"Without {', '.join(client.unwanted)}: {client.why_unwanted}.", ""]
    lines += [f"- {what}{': ' if detail else ''}{detail}" for what, detail in found.get("seen", ())]
    if "error" in found:
        lines += ["", "Failed:", "", "```", found["error"], "```"]
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check each client; the exit code is 1 if any failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [client.name for client in CLIENTS]
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--environments", type=Path, required=True, help="folder of virtual environments")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    cpu = next(
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    )
    page = [
        f"# Clients of the server, {date.today().isoformat()}",
        "",
        f"`python -m benchmarks.clients` on {cpu}, Python {platform.python_version()}: each client in an",
        f"environment of its own, against `hpu-duo serve {' '.join(_SERVER)}`",
        "of the built-in model. A line tells what was asserted. Times are of a machine with other users.",
        "",
    ]
    has_failed = False
    for client in CLIENTS:
        if client.name not in args.only:
            continue
        found = check(client, args.environments)
        has_failed |= "error" in found
        lines = lines_of(client, found)
        page += lines
        print("\n".join(lines), flush=True)
    if args.out is not None:
        args.out.write_text("\n".join(page), encoding="utf-8")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())

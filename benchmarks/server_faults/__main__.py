"""Command line of the parts: see the package."""

from __future__ import annotations

import argparse
import importlib
import platform
import tempfile
from contextlib import ExitStack
from datetime import date
from pathlib import Path

import torch

from benchmarks.server_faults.page import Page
from benchmarks.serving import serving

PARTS = ("fuzz", "bombs", "kills", "ending", "disk", "connections", "files", "soak")
_INTRODUCTION = """# Faults of the server

Made by `python -m benchmarks.server_faults PART --page benchmarks/results/server-faults.md`. Each part harms
a server of the built-in model in a process of its own, asserts what is said here, and that the server ends
with code 0 and without a traceback. Times are of a machine with other users."""


def run(name: str, scale: float) -> tuple[str, str]:
    """Title and section of a part."""
    part = importlib.import_module(f"benchmarks.server_faults.{name}")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with ExitStack() as opened:
            arguments = part.SERVER
            if hasattr(part, "more_arguments"):
                arguments += opened.enter_context(part.more_arguments(Path(folder)))
            most_files = getattr(part, "MOST_FILES", None)
            server = opened.enter_context(serving(arguments, log, most_files=most_files))
            text = part.report(server, scale)
        told = log.read_text(encoding="utf-8")
        assert "Traceback" not in told, told[-3000:]
        assert server.process.returncode == 0, (server.process.returncode, told[-3000:])
    return part.TITLE, f"`hpu-duo serve {' '.join(part.SERVER)}`\n\n{text}"


def place() -> str:
    """The day, the machine and the versions."""
    cpu = next(
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    )
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{date.today().isoformat()}, {cpu}, {versions}"


def main() -> None:
    """Run parts, and print their sections or write them into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the numbers to do it with")
    parser.add_argument("--page", type=Path, help="Markdown page to write the sections into")
    options = parser.parse_args()
    for name in options.parts or PARTS:
        title, text = run(name, options.scale)
        section = f"`python -m benchmarks.server_faults {name}`, {place()}; {text}"
        print(f"## {title}\n\n{section}\n", flush=True)
        if options.page is not None:
            is_there = options.page.exists()
            page = Page.read(options.page) if is_there else Page(_INTRODUCTION)
            options.page.write_text(str(page.with_section(title, section)), encoding="utf-8")


if __name__ == "__main__":
    main()

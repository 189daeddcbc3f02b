"""Time that the self-test takes on the simulated device.

    python -m benchmarks.first_contact selftest

Takes a minute on one core.
"""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch

from benchmarks.first_contact.page import paragraph
from benchmarks.first_contact.recording import processor

TITLE = "The self-test on the simulated device"


def report() -> Iterator[str]:
    """Lines of the section."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["selftest", "--device", "hpu-sim", "--hardware", "gaudi3", "--output", folder]
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "hpu_duo.cli", *arguments], capture_output=True, text=True
        )
        wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    yield paragraph(
        f"""
        `python -m benchmarks.first_contact selftest` runs `hpu-duo selftest --device hpu-sim
        --hardware gaudi3`: exit status {done.returncode}, {wall_s:.0f} s of wall time, {cpu_s:.0f} s of
        process time. {processor()}, torch {torch.__version__},
        Python {platform.python_version()}, 2026-11-22. Stages:
        """
    )
    yield ""
    yield from (f"- {line.strip()}" for line in done.stdout.splitlines() if line.lstrip()[:1] in ("✓", "✗"))

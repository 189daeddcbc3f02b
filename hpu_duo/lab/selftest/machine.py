"""The environment: versions, variables, the vendor's tool, and whether the device is usable at all."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from hpu_duo.device import problem
from hpu_duo.lab.selftest.facts import machine_facts
from hpu_duo.lab.selftest.finding import Notes
from hpu_duo.lab.selftest.subject import Subject

_PREFIXES = ("PT_", "HABANA", "HL_", "HLS_", "HCCL", "GC_", "FUSER_", "OMP_", "ENABLE_", "LOG_LEVEL")
"""Beginnings of the names of variables that the vendor's software, torch and OpenMP read."""
_ADDRESSES = {"HCCL_COMM_ID"}
"""Variables with addresses, which a report does not have."""
_TOOL_FIELDS = "index,name,driver_version,bus_id,memory.total,memory.used,temperature.aip"
_TOOL = ("hl-smi", "-Q", _TOOL_FIELDS, "-f", "csv")
_TOOL_DEADLINE_S = 30.0
_MODULE_VERSION = Path("/sys/module/habanalabs/version")
_HUGE_PAGES = "HugePages_Total"


def describe_machine(subject: Subject, notes: Notes) -> None:
    """Note everything that a reader of the report asks first; bad is only a device that cannot be used."""
    for fact in machine_facts():
        name = f"{fact.topic}: {fact.name}"
        if fact.topic == "versions" and fact.is_usable is not None:
            notes.check(name, fact.is_usable, fact.detail)
        else:
            notes.fact(name, fact.detail)
    for name, value in sorted(os.environ.items()):
        if name.startswith(_PREFIXES):
            notes.fact(f"variable: {name}", "is set" if name in _ADDRESSES else value)
    if _MODULE_VERSION.exists():
        notes.fact("driver", _MODULE_VERSION.read_text(encoding="utf-8").strip())
    _ask_tool(subject, notes)
    _host(notes)
    notes.begin(f"looking for {subject.device}")
    reason = problem(subject.kind)
    notes.check(f"device: {subject.device}", reason is None, reason or "usable")


def _ask_tool(subject: Subject, notes: Notes) -> None:
    if shutil.which(_TOOL[0]) is None:
        if subject.kind == "hpu":
            notes.fact(_TOOL[0], "is not on the path")
        return
    notes.begin(" ".join(_TOOL))
    try:
        done = subprocess.run(_TOOL, capture_output=True, text=True, timeout=_TOOL_DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        notes.check(_TOOL[0], False, str(error))
        return
    for line in done.stdout.strip().splitlines():
        notes.fact(_TOOL[0], line.strip())


def _host(notes: Notes) -> None:
    notes.fact("host: CPUs", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} may be used")
    nodes = sorted(path.name for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    notes.fact("host: NUMA", ", ".join(nodes) or "unknown")
    memory = Path("/proc/meminfo")
    if memory.exists():
        values = dict(line.split(":", 1) for line in memory.read_text(encoding="utf-8").splitlines())
        for name in ("MemTotal", "MemAvailable", _HUGE_PAGES):
            notes.fact(f"host: {name}", values.get(name, "unknown").strip())

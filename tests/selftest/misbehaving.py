"""Stages that do to their process what a card may do, for processes that import this file."""

from __future__ import annotations

import os
import time

from hpu_duo.lab.selftest.finding import Notes
from hpu_duo.lab.selftest.subject import Subject


def good(subject: Subject, notes: Notes) -> None:
    notes.check("good", True, f"on {subject.device}")
    notes.fact("mode", os.environ.get("PT_HPU_LAZY_MODE", "none"))
    notes.fact("process", str(os.getpid()))


def raises(subject: Subject, notes: Notes) -> None:
    notes.check("before", True, "seen")
    raise RuntimeError("no such operator")


def dies(subject: Subject, notes: Notes) -> None:
    notes.check("before", True, "seen")
    notes.begin("aten.fatal")
    os._exit(9)


def hangs(subject: Subject, notes: Notes) -> None:
    notes.begin("waiting for the card")
    time.sleep(600)


def disagrees(subject: Subject, notes: Notes) -> None:
    notes.check("sum", False, "expected 2, got 3")

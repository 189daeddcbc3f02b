"""Steps written to a file as their messages, and carried out again: for debugging."""

from hpu_duo.steplog.file import CutLogError, StepLog, StepRecorder, read_log
from hpu_duo.steplog.origin import options_of, origin_of
from hpu_duo.steplog.replay import ReplayReport, replay

__all__ = [
    "CutLogError",
    "ReplayReport",
    "StepLog",
    "StepRecorder",
    "options_of",
    "origin_of",
    "read_log",
    "replay",
]

"""Steps written to a file as their messages; ``hpu_duo.steplog.replay`` carries them out again."""

from hpu_duo.steplog.file import CutLogError, StepLog, StepRecorder, read_log
from hpu_duo.steplog.origin import options_of, origin_of

__all__ = [
    "CutLogError",
    "StepLog",
    "StepRecorder",
    "options_of",
    "origin_of",
    "read_log",
]

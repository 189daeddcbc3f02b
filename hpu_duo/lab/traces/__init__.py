"""Requests as they come to a server: read from published traces, or drawn at random.

The package knows no engine, model or network; load generator and simulations take their requests from it.
"""

from hpu_duo.lab.traces.arrival import Arrival, Lengths, Rate, at_times, in_order, no_longer_than, scaled
from hpu_duo.lab.traces.file import TraceFile, TraceFormat, read_trace
from hpu_duo.lab.traces.prompts import PromptIds
from hpu_duo.lab.traces.readers.mooncake import write_mooncake
from hpu_duo.lab.traces.session import Session, Turn, count_requests
from hpu_duo.lab.traces.synthetic import RandomLengths
from hpu_duo.lab.traces.workloads import WORKLOADS, Workload, make_workload, with_shorter

__all__ = [
    "WORKLOADS",
    "Arrival",
    "Lengths",
    "PromptIds",
    "RandomLengths",
    "Rate",
    "Session",
    "TraceFile",
    "TraceFormat",
    "Turn",
    "Workload",
    "at_times",
    "count_requests",
    "in_order",
    "make_workload",
    "no_longer_than",
    "read_trace",
    "scaled",
    "with_shorter",
    "write_mooncake",
]

"""Open-loop load for servers that speak OpenAI's HTTP interface, and what their answers took.

Requests leave when their trace says so, however long earlier ones take. Nothing here knows an engine: any
server is measured by the same client. ``hpu_duo.load.client`` needs aiohttp (extra ``bench``), the rest does
not.
"""

from hpu_duo.load.endpoint import Endpoint
from hpu_duo.load.outcome import Failure, Outcome
from hpu_duo.load.plan import PlannedRequest, plan_requests
from hpu_duo.load.result import result_fields
from hpu_duo.load.run import LoadRun, Pace
from hpu_duo.load.summary import Goals, Summary

__all__ = [
    "Endpoint",
    "Failure",
    "Goals",
    "LoadRun",
    "Outcome",
    "Pace",
    "PlannedRequest",
    "Summary",
    "plan_requests",
    "result_fields",
]

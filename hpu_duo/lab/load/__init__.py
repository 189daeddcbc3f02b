"""Open-loop load for servers with OpenAI's HTTP interface, and the times of their answers.

Requests are sent at the times of their trace, however long earlier ones take. The client knows no engine, so
any server can be measured. ``hpu_duo.lab.load.client`` needs aiohttp (extra ``bench``), the rest does not.
"""

from hpu_duo.lab.load.endpoint import Endpoint
from hpu_duo.lab.load.outcome import Failure, Outcome
from hpu_duo.lab.load.plan import PlannedRequest, plan_requests
from hpu_duo.lab.load.run import LoadRun, Pace
from hpu_duo.lab.load.summary import Goals, Summary, result_fields

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

"""From a request of the API to what the engine is asked for, or a refusal."""

from hpu_duo.server.planning.chat import ChatPlanner
from hpu_duo.server.planning.completions import CompletionPlanner
from hpu_duo.server.planning.plan import Plan, SamplingDefaults, Scoring, Served

__all__ = ["ChatPlanner", "CompletionPlanner", "Plan", "SamplingDefaults", "Scoring", "Served"]

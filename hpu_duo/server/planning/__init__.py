"""Validation of requests of the API, and their conversion to engine requests."""

from hpu_duo.server.planning.chat import ChatPlanner, CompletionPlanner
from hpu_duo.server.planning.plan import Plan, SamplingDefaults, Scoring, Served

__all__ = ["ChatPlanner", "CompletionPlanner", "Plan", "SamplingDefaults", "Scoring", "Served"]

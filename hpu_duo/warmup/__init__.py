"""Warm-up: estimated, bounded, measured, written down, and repeated."""

from hpu_duo.warmup.configuration import configuration_of, known_before_loading, limits_of, versions_of
from hpu_duo.warmup.estimate import PRIORS, Estimate, GraphEstimate, Prior, WarmUpBudget
from hpu_duo.warmup.selection import check_holds_everything, parse_phases, select
from hpu_duo.warmup.tool import Progress, WarmUp, WarmUpReport

__all__ = [
    "PRIORS",
    "Estimate",
    "GraphEstimate",
    "Prior",
    "Progress",
    "WarmUp",
    "WarmUpBudget",
    "WarmUpReport",
    "check_holds_everything",
    "configuration_of",
    "known_before_loading",
    "limits_of",
    "parse_phases",
    "select",
    "versions_of",
]

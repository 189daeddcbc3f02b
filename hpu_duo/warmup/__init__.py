"""Warm-up: estimated, bounded, measured, recorded in a manifest, and repeated."""

from hpu_duo.startup.sizes import StepSizes
from hpu_duo.warmup.configuration import configuration_of, known_before_loading, versions_of
from hpu_duo.warmup.estimate import (
    PRIORS,
    Estimate,
    GraphCosts,
    GraphEstimate,
    Prior,
    WarmUpBudget,
    estimate_of,
)
from hpu_duo.warmup.given_buckets import GivenBuckets
from hpu_duo.warmup.planning import plan_within
from hpu_duo.warmup.selection import check_holds_everything, parse_phases, select
from hpu_duo.warmup.tool import Progress, WarmUp, WarmUpReport, WarmUpStoppedError

__all__ = [
    "PRIORS",
    "Estimate",
    "GivenBuckets",
    "GraphCosts",
    "GraphEstimate",
    "Prior",
    "Progress",
    "StepSizes",
    "WarmUp",
    "WarmUpBudget",
    "WarmUpReport",
    "WarmUpStoppedError",
    "check_holds_everything",
    "configuration_of",
    "estimate_of",
    "known_before_loading",
    "parse_phases",
    "plan_within",
    "select",
    "versions_of",
]

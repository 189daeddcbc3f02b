"""Scheduling policies: who runs first where not everybody can run."""

from collections.abc import Callable

from hpu_duo.option_spec import call_with_options
from hpu_duo.scheduling.policy import ArrivalOrder, CachedPrefix, SchedulingPolicy, Waiting
from hpu_duo.scheduling.ranked import (
    FirstComeFirstServed,
    LearnedToRank,
    MultiLevelFeedback,
    PriorityFirst,
    RankedPolicy,
    ShortestJobFirst,
    ShortestRemainingFirst,
)
from hpu_duo.scheduling.vtc import (
    CachedShareGroups,
    DeficitLongestPrefixMatch,
    DepthFirst,
    LongestPrefixMatch,
    VirtualTokenCounter,
)

__all__ = [
    "POLICIES",
    "ArrivalOrder",
    "CachedPrefix",
    "CachedShareGroups",
    "DeficitLongestPrefixMatch",
    "DepthFirst",
    "FirstComeFirstServed",
    "LearnedToRank",
    "LongestPrefixMatch",
    "MultiLevelFeedback",
    "PriorityFirst",
    "RankedPolicy",
    "SchedulingPolicy",
    "ShortestJobFirst",
    "ShortestRemainingFirst",
    "VirtualTokenCounter",
    "Waiting",
    "make_policy",
]

POLICIES: dict[str, Callable[..., SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityFirst,
    "sjf": ShortestJobFirst,
    "srtf": ShortestRemainingFirst,
    "mlfq": MultiLevelFeedback,
    "lpm": LongestPrefixMatch,
    "dfs-weight": DepthFirst,
    "preble": CachedShareGroups,
    "vtc": VirtualTokenCounter,
    "dlpm": DeficitLongestPrefixMatch,
    "ltr": LearnedToRank,
}
"""Policies by name. Each scheduler has its own instance, because policies are stateful."""


def make_policy(name: str) -> SchedulingPolicy:
    """Create a policy from its name and options, such as ``priority:patience=100``.

    Raises:
        ValueError: there is none of this name, or it has no such option or not with this value.
    """
    policy = call_with_options("scheduling_policy", name, POLICIES)
    policy.name = name
    return policy

"""A simulated run in numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from hpu_duo.lab.distribution import Distribution
from hpu_duo.lab.simulate.fairness import Fairness
from hpu_duo.lab.simulate.run_log import OffloadFigures, RequestRecord, RunLog

METRICS = ("ttft", "tpot", "e2el", "latency_per_token")
"""Time to first token, time per token behind it, end to end, and that divided by the output's tokens."""


@dataclass(frozen=True)
class ReplicaFigures:
    """Figures that several replicas add to the report of a run.

    Attributes:
        router: its name, with options.
        num_replicas: replicas.
        expected_hit_rate: share of the prompt tokens that the router expected to be cached when it sent them.
        num_lost: requests that lost their replica and were sent again, each as often as it did.
    """

    router: str
    num_replicas: int
    expected_hit_rate: float
    num_lost: int


@dataclass(frozen=True)
class RunReport:
    """A run under one policy; times are in seconds.

    Attributes:
        policy: its name, with options.
        duration_s: from 0 to the end of the last step.
        num_requests, num_completed: those that came, and those of them that ended.
        num_prompt_tokens, num_output_tokens: of requests that ended.
        num_cached_tokens: prompt tokens that requests took up from the prefix cache with their first row.
        num_looked_up_tokens: prompt tokens of these requests.
        num_preemptions, num_steps: of the run.
        busy_share: share of the time in which a step ran.
        padding: share of the steps' cost that is padding, by the relative cost of shapes.
        token_padding: share of the steps' query tokens that is padding.
        metrics: a distribution for each of ``METRICS``, in milliseconds, of requests that ended.
        longest_wait_s: longest time for which a request waited to start; to the end of the run if it never
            did.
        fairness: of users.
        e2el_by_user: mean seconds from coming to the end, of the users that ``fairness`` compares.
        replicas: None where there is one engine and no router; ``busy_share`` is their mean.
        offload: traffic with host memory; None without any.
    """

    policy: str
    duration_s: float
    num_requests: int
    num_completed: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_looked_up_tokens: int
    num_preemptions: int
    num_steps: int
    busy_share: float
    padding: float
    token_padding: float
    metrics: dict[str, Distribution]
    longest_wait_s: float
    fairness: Fairness
    e2el_by_user: dict[str, float] = field(default_factory=dict)
    replicas: ReplicaFigures | None = None
    offload: OffloadFigures | None = None

    @classmethod
    def of(
        cls,
        policy: str,
        log: RunLog,
        percentiles: Sequence[float] = (50.0, 99.0),
        replicas: ReplicaFigures | None = None,
    ) -> RunReport:
        """Sum up a run whose log has been closed.

        Args:
            percentiles: of every distribution, 0 to 100.
        """
        records = list(log.records.values())
        started = [each for each in records if each.started is not None]
        ended = [each for each in records if each.ended is not None]
        fairness = Fairness.of(records, log.service, log.end)
        return cls(
            policy=policy,
            duration_s=log.end,
            num_requests=len(records),
            num_completed=len(ended),
            num_prompt_tokens=sum(each.num_prompt_tokens for each in ended),
            num_output_tokens=sum(each.num_output_tokens for each in ended),
            num_cached_tokens=sum(each.num_cached_tokens for each in started),
            num_looked_up_tokens=sum(each.num_prompt_tokens for each in started),
            num_preemptions=sum(each.num_preemptions for each in records),
            num_steps=log.num_steps,
            busy_share=_share(log.busy, log.end * (replicas.num_replicas if replicas else 1)),
            padding=1.0 - _share(log.cost_of_shapes, log.cost_of_buckets, 1.0),
            token_padding=1.0 - _share(log.num_tokens, log.num_padded_tokens, 1.0),
            metrics={name: Distribution.of(_values(name, ended), percentiles) for name in METRICS},
            longest_wait_s=max((_wait(each, log.end) for each in records), default=0.0),
            fairness=fairness,
            e2el_by_user=_means_by_user(ended, fairness.service),
            replicas=replicas,
            offload=log.offload,
        )

    @property
    def title(self) -> str:
        """The router, if there is one, and the policy."""
        return self.policy if self.replicas is None else f"{self.replicas.router} / {self.policy}"

    @property
    def requests_per_s(self) -> float:
        """Requests that ended per second of the run."""
        return _share(self.num_completed, self.duration_s)

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of requests that ended per second of the run."""
        return _share(self.num_output_tokens, self.duration_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of prompts and outputs of requests that ended per second of the run."""
        return _share(self.num_prompt_tokens + self.num_output_tokens, self.duration_s)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens of requests that were taken up from the prefix cache."""
        return _share(self.num_cached_tokens, self.num_looked_up_tokens)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values, under the names of ``bench serve`` where it has them."""
        fields: dict[str, Any] = {
            "scheduling_policy": self.policy,
            "duration": self.duration_s,
            "num_requests": self.num_requests,
            "completed": self.num_completed,
            "total_input_tokens": self.num_prompt_tokens,
            "total_output_tokens": self.num_output_tokens,
            "request_throughput": self.requests_per_s,
            "output_throughput": self.output_tokens_per_s,
            "total_token_throughput": self.tokens_per_s,
            "prefix_hit_rate": self.hit_rate,
            "num_preemptions": self.num_preemptions,
            "num_steps": self.num_steps,
            "busy_share": self.busy_share,
            "padding": self.padding,
            "token_padding": self.token_padding,
            "longest_wait": self.longest_wait_s,
            "service": self.fairness.service,
            "largest_service_difference": self.fairness.largest_difference,
            "largest_service_difference_between": self.fairness.pair,
            "largest_service_difference_by_time": self.fairness.growth,
            "mean_e2el_by_user": self.e2el_by_user,
            "users_compared": self.fairness.num_compared,
        }
        if self.replicas is not None:
            fields |= {
                "router": self.replicas.router,
                "num_replicas": self.replicas.num_replicas,
                "expected_prefix_hit_rate": self.replicas.expected_hit_rate,
                "num_lost": self.replicas.num_lost,
            }
        if self.offload is not None:
            fields["offload"] = asdict(self.offload)
        for name, distribution in self.metrics.items():
            fields |= distribution.fields(name)
        return fields


def _values(name: str, records: Sequence[RequestRecord]) -> list[float]:
    return [value for each in records if (value := getattr(each, name)) is not None]


def _means_by_user(ended: Sequence[RequestRecord], users: Collection[str]) -> dict[str, float]:
    times: dict[str, list[float]] = {user: [] for user in users}
    for each in ended:
        if each.user in times and each.e2el is not None:
            times[each.user].append(each.e2el)
    return {user: fmean(found) for user, found in times.items() if found}


def _wait(record: RequestRecord, end: float) -> float:
    return max(0.0, (end if record.started is None else record.started) - record.arrived)


def _share(part: float, whole: float, of_nothing: float = 0.0) -> float:
    return part / whole if whole else of_nothing

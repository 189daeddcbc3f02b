"""Throughput, latencies and goodput of a run, by the definitions of vLLM's ``bench serve``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpu_duo.lab.distribution import Distribution
from hpu_duo.lab.load.outcome import Outcome

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token behind it, gaps between tokens, end to end."""


@dataclass(frozen=True)
class Goals:
    """Latency goals of a good request, in milliseconds; None is no goal."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Goals:
        """Read ``ttft:500``, ``tpot:50`` and ``e2el:10000``.

        Raises:
            ValueError: something else, or a metric twice.
        """
        found: dict[str, float] = {}
        for text in texts:
            name, _, number = text.partition(":")
            try:
                limit = float(number)
            except ValueError:
                limit = -1.0
            if name not in ("ttft", "tpot", "e2el") or name in found or not limit >= 0:
                raise ValueError(
                    "expected goals such as ttft:500, tpot:50 and e2el:10000, in milliseconds and each at "
                    f"most once, got {text!r}"
                )
            found[name] = limit
        return cls(**{f"{name}_ms": limit for name, limit in found.items()})

    @property
    def is_empty(self) -> bool:
        """Whether there is no goal."""
        return self.ttft_ms is None and self.tpot_ms is None and self.e2el_ms is None

    def are_kept_by(self, outcome: Outcome) -> bool:
        """Whether a whole answer meets all goals; an answer of one token meets any tpot."""
        pairs = (
            (self.ttft_ms, outcome.ttft_s),
            (self.tpot_ms, outcome.tpot_s or 0.0),
            (self.e2el_ms, outcome.latency_s),
        )
        return all(limit is None or value * 1000 <= limit for limit, value in pairs)


@dataclass(frozen=True)
class Summary:
    """A run in numbers. Only whole answers count, but for ``failures``.

    Attributes:
        duration_s: the run, from its beginning to the last end.
        num_completed, num_failed: requests.
        num_prompt_tokens, num_output_tokens: of whole answers.
        num_good: whole answers that meet all goals; None without goals.
        metrics: a distribution for each of ``METRICS``.
        lag: delays of sending after the planned times.
        peak_concurrency: most requests under way at the same time.
        peak_output_tokens: most tokens within one of the seconds counted from the first request on.
        failures: numbers of failed requests by reason.
        num_counted_by_events: answers whose tokens the server did not count, so that events were taken for
            tokens.
    """

    duration_s: float
    num_completed: int
    num_failed: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_good: int | None
    metrics: dict[str, Distribution]
    lag: Distribution
    peak_concurrency: int
    peak_output_tokens: int
    failures: dict[str, int]
    num_counted_by_events: int

    @classmethod
    def of(
        cls,
        outcomes: Sequence[Outcome],
        duration_s: float,
        goals: Goals | None = None,
        percentiles: Sequence[float] = (99.0,),
    ) -> Summary:
        """Sum up a run.

        Args:
            percentiles: of every distribution, 0 to 100.

        Raises:
            ValueError: a percentile out of range, or a run of no time.
        """
        if not duration_s > 0 or any(not 0 <= at <= 100 for at in percentiles):
            raise ValueError(
                f"expected a duration above 0 and percentiles from 0 to 100, got {duration_s} s and "
                f"{list(percentiles)}"
            )
        whole = [each for each in outcomes if each.is_whole]
        values = {
            "ttft": [each.ttft_s for each in whole],
            "tpot": [tpot for each in whole if (tpot := each.tpot_s) is not None],
            "itl": [gap for each in whole for gap in each.itls_s],
            "e2el": [each.latency_s for each in whole],
        }
        sent = [each.lag_s for each in outcomes if each.is_sent]
        return cls(
            duration_s=duration_s,
            num_completed=len(whole),
            num_failed=len(outcomes) - len(whole),
            num_prompt_tokens=sum(each.num_prompt_tokens for each in whole),
            num_output_tokens=sum(each.num_output_tokens for each in whole),
            num_good=None if goals is None or goals.is_empty else sum(map(goals.are_kept_by, whole)),
            metrics={name: Distribution.of(values[name], percentiles) for name in METRICS},
            lag=Distribution.of(sent, percentiles),
            peak_concurrency=_peak_concurrency(whole),
            peak_output_tokens=_peak_output_tokens(whole),
            failures=dict(Counter(each.kind for each in outcomes if not each.is_whole)),
            num_counted_by_events=sum(not each.is_counted_by_server for each in whole),
        )

    @property
    def requests_per_s(self) -> float:
        """Whole answers per second of the run."""
        return self.num_completed / self.duration_s

    @property
    def goodput_per_s(self) -> float | None:
        """Answers that meet all goals, per second; None without goals."""
        return None if self.num_good is None else self.num_good / self.duration_s

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second of the run."""
        return self.num_output_tokens / self.duration_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens of prompts and outputs per second of the run."""
        return (self.num_prompt_tokens + self.num_output_tokens) / self.duration_s


def _peak_concurrency(outcomes: Iterable[Outcome]) -> int:
    """Most requests at the same time; one that begins as another ends does not overlap it."""
    changes = sorted(change for each in outcomes for change in ((each.sent_s, 1), (each.end_s, -1)))
    return int(max(np.cumsum([step for _, step in changes]), default=0))


def _peak_output_tokens(outcomes: Sequence[Outcome]) -> int:
    times = np.array([time for each in outcomes for time in each.token_times_s])
    if not len(times):
        return 0
    first = min(each.sent_s for each in outcomes)
    return int(np.bincount((times - first).astype(np.int64)).max())


FORMAT = "hpu-duo bench serve 1"


def result_fields(
    summary: Summary, settings: Mapping[str, Any], details: Sequence[Outcome] | None = None
) -> dict[str, Any]:
    """Return the JSON object of a run.

    Args:
        settings: of the run and of the server.
        details: outcomes to write request by request, with texts.
    """
    fields: dict[str, Any] = {
        "format": FORMAT,
        **settings,
        "duration": summary.duration_s,
        "completed": summary.num_completed,
        "failed": summary.num_failed,
        "failures": summary.failures,
        "total_input_tokens": summary.num_prompt_tokens,
        "total_output_tokens": summary.num_output_tokens,
        "request_throughput": summary.requests_per_s,
        "request_goodput": summary.goodput_per_s,
        "output_throughput": summary.output_tokens_per_s,
        "total_token_throughput": summary.tokens_per_s,
        "max_output_tokens_per_s": summary.peak_output_tokens,
        "max_concurrent_requests": summary.peak_concurrency,
        "counted_by_events": summary.num_counted_by_events,
    }
    for name, distribution in (*summary.metrics.items(), ("send_lag", summary.lag)):
        fields |= distribution.fields(name)
    return fields if details is None else {**fields, **_detail_fields(details)}


def _detail_fields(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "input_lens": [each.num_prompt_tokens for each in outcomes],
        "output_lens": [each.num_output_tokens if each.is_whole else 0 for each in outcomes],
        "ttfts": [each.ttft_s for each in outcomes],
        "itls": [each.itls_s for each in outcomes],
        "latencies": [each.latency_s for each in outcomes],
        "start_times": [each.sent_s for each in outcomes],
        "queue_times": [each.lag_s for each in outcomes],
        "generated_texts": [each.text for each in outcomes],
        "errors": [each.error for each in outcomes],
        "statuses": [each.status for each in outcomes],
    }

"""Metrics of a server, for Prometheus.

Those that mean what vLLM's mean have its names, behind a prefix of choice; see docs/server.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from hpu_duo.engine.stats import EngineStats
    from hpu_duo.server.telemetry.request_log import CallRecord


class Histogram:
    """Numbers of observations up to each of some bounds.

    Only one thread adds to it; others may read, and see an observation more or less.

    Args:
        bounds: upper bounds, ascending; one for all others is added.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Observe a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def write(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Put what has been observed into a family of metrics."""
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts):
            total += count
            buckets.append((floatToGoString(bound), total))
        family.add_metric(labels, buckets, self._sum)


_OWN = "hpuduo"
"""Prefix of what vLLM has no name for."""

_SHORT_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
)
_LONG_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_CALL_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the arrival of a call to the first token of each choice.", _LONG_S),
    "inter_token_latency_seconds": ("Between tokens of a choice.", _SHORT_S),
    "e2e_request_latency_seconds": ("From the arrival of a call to the end of its answer.", _CALL_S),
    "request_queue_time_seconds": ("From the arrival of a call to its first prompt's row.", _LONG_S),
    "request_prefill_time_seconds": ("From the row of a call's first prompt to its first token.", _LONG_S),
    "request_inference_time_seconds": ("From the row of a call's first prompt to its last token.", _CALL_S),
    "request_decode_time_seconds": ("From the first to the last token of a call.", _CALL_S),
    "request_time_per_output_token_seconds": ("Mean time between the tokens of a call.", _SHORT_S),
    "request_prompt_tokens": ("Prompt tokens of a call.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a call.", _TOKENS),
    "request_params_max_tokens": ("max_tokens of a call, where it has one.", _TOKENS),
    "request_params_n": ("Choices of a call.", _CHOICES),
}

_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Samples that have a row.", lambda stats: stats.num_running),
    "kv_cache_usage_perc": (
        "Share of the KV blocks that are allocated; of the rows where no head keeps blocks. 1 is all.",
        lambda stats: _usage(stats),
    ),
}

_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_preemptions": ("Times a request lost its place for want of blocks.", lambda s: s.num_preemptions),
    "prompt_tokens": ("Prompt tokens computed, again after a preemption.", lambda s: s.num_prompt_tokens),
    "generation_tokens": ("Tokens sampled.", lambda s: s.num_output_tokens),
    "prefix_cache_queries": (
        "Tokens of requests that the prefix cache was asked for.",
        lambda s: s.prefixes.num_queried_tokens if s.prefixes else 0,
    ),
    "prefix_cache_hits": (
        "Tokens of requests that the prefix cache had.",
        lambda s: s.prefixes.num_hit_tokens if s.prefixes else 0,
    ),
}

_OWN_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "query_tokens": ("Query tokens of all steps, padding included.", lambda s: s.num_query_tokens),
    "padded_tokens": ("Query tokens that were padding.", lambda s: s.num_padded_tokens),
    "bucket_misses": ("Steps whose shape no bucket held.", lambda s: s.num_graph_misses),
    "late_captures": ("Planned buckets captured when a request needed them.", lambda s: s.num_late_captures),
    "uncaptured_steps": ("Steps of buckets too long to be captured.", lambda s: s.num_uncaptured_steps),
    "prefix_tokens_lost_to_snapshots": (
        "Tokens in cached blocks that could not be taken up for want of a snapshot of rings.",
        lambda s: s.prefixes.num_lost_to_snapshots if s.prefixes else 0,
    ),
    "prefix_tokens_lost_to_blocks": (
        "Tokens that had been in cached blocks, which were evicted to make room.",
        lambda s: s.prefixes.num_lost_to_blocks if s.prefixes else 0,
    ),
    "prefix_blocks_evicted": (
        "Cached blocks evicted to make room.",
        lambda s: s.prefixes.num_evicted_blocks if s.prefixes else 0,
    ),
    "prefix_snapshots_evicted": (
        "Snapshots of rings evicted to make room.",
        lambda s: s.prefixes.num_evicted_snapshots if s.prefixes else 0,
    ),
    "step_host_seconds": ("Seconds spent planning and building steps.", lambda s: s.host_s),
    "step_device_seconds": ("Seconds spent running steps.", lambda s: s.device_s),
    "rank_broadcasts": (
        "Broadcasts of rank 0 to the others that share the model.",
        lambda s: s.ranks.num_broadcasts if s.ranks else 0,
    ),
    "rank_broadcast_bytes": (
        "Bytes of these broadcasts.",
        lambda s: s.ranks.broadcast_bytes if s.ranks else 0,
    ),
    "rank_reduced_bytes": (
        "Bytes that a rank has given to sums over ranks.",
        lambda s: s.ranks.reduced_bytes if s.ranks else 0,
    ),
    "rank_gathered_bytes": (
        "Bytes that a rank has given to gathers.",
        lambda s: s.ranks.gathered_bytes if s.ranks else 0,
    ),
    "rank_scattered_bytes": (
        "Bytes that a rank has given to exchanges all to all.",
        lambda s: s.ranks.scattered_bytes if s.ranks else 0,
    ),
    "copied_bytes": ("Bytes of step messages, copied to the device.", lambda s: s.bytes_copied),
}

_OWN_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "blocks_used": ("KV blocks allocated.", lambda s: s.used_blocks),
    "blocks_total": ("KV blocks.", lambda s: s.total_blocks),
    "rows_used": ("Rows allocated.", lambda s: s.used_rows),
    "rows_total": ("Rows.", lambda s: s.total_rows),
    "kv_store_bytes": ("Bytes that the stores of keys and values take.", lambda s: s.kv_bytes),
    "kv_held_bytes": ("Bytes of the allocated blocks and rows.", lambda s: s.held_bytes),
    "prefix_idle_bytes": (
        "Bytes of cached blocks that no request holds.",
        lambda s: s.prefixes.idle_bytes if s.prefixes else 0,
    ),
    "prefix_context_bytes": (
        "Bytes of blocks that contexts hold.",
        lambda s: s.prefixes.context_bytes if s.prefixes else 0,
    ),
    "prefix_snapshot_bytes": (
        "Bytes of snapshots of rings.",
        lambda s: s.prefixes.snapshot_bytes if s.prefixes else 0,
    ),
    "kv_full_attention_bytes": (
        "Bytes that the same tokens would take if every head kept them all.",
        lambda s: s.full_attention_bytes,
    ),
}


class ServerMetrics(Collector):
    """Counts what happens to calls, and reads what steps count.

    Args:
        model: label of all metrics.
        stats: of the engine, as of a moment ago.
        num_open: samples that run and wait.
        num_recompiles: compilations and captures after warm-up.
        answer_bytes: of outputs of calls under way.
        namespace: prefix of those that are called as vLLM's.
    """

    def __init__(
        self,
        model: str,
        stats: Callable[[], EngineStats],
        num_open: Callable[[], int],
        num_recompiles: Callable[[], int],
        answer_bytes: Callable[[], int],
        namespace: str = _OWN,
    ) -> None:
        self._labels = {"model_name": model, "engine": "0"}
        self._stats, self._num_open, self._num_recompiles = stats, num_open, num_recompiles
        self._answer_bytes, self._namespace = answer_bytes, namespace
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._first = self._histograms["time_to_first_token_seconds"]
        self._next = self._histograms["inter_token_latency_seconds"]
        self._ended: Counter[str] = Counter()
        self._responses: Counter[tuple[str, str, str]] = Counter()
        self._lost_lines = 0

    def first_token(self, seconds: float) -> None:
        """See ``TokenWatch``."""
        self._first.add(seconds)

    def next_token(self, seconds: float) -> None:
        """See ``TokenWatch``."""
        self._next.add(seconds)

    def responded(self, method: str, path: str, status: int) -> None:
        """Count a response."""
        self._responses[method, path, str(status)] += 1

    def lost_line(self) -> None:
        """Count a line that could not be written to a log."""
        self._lost_lines += 1

    def ended(self, record: CallRecord) -> None:
        """Account for a call that was taken."""
        plan = record.plan
        if not record.is_opened or plan is None or plan.params is None:
            return
        self._ended.update(record.reasons)
        usage, timing, add = plan.answer.usage, record.timing, self._add
        add("e2e_request_latency_seconds", record.seconds)
        add("request_prompt_tokens", usage.prompt_tokens)
        add("request_generation_tokens", usage.completion_tokens)
        add("request_params_n", len(plan.answer.choices))
        if plan.params.max_tokens is not None:
            add("request_params_max_tokens", plan.params.max_tokens)
        if timing.first is not None and timing.last is not None:
            if timing.admitted is not None:
                add("request_queue_time_seconds", max(0.0, timing.admitted - timing.arrived))
                add("request_prefill_time_seconds", timing.first - timing.admitted)
                add("request_inference_time_seconds", timing.last - timing.admitted)
            add("request_decode_time_seconds", timing.last - timing.first)
            if usage.completion_tokens > 1:
                each = (timing.last - timing.first) / (usage.completion_tokens - 1)
                add("request_time_per_output_token_seconds", each)

    def _add(self, name: str, value: float) -> None:
        self._histograms[name].add(value)

    def collect(self) -> Iterator[Metric]:
        """Everything, as Prometheus' client has it."""
        stats, names, values = self._stats(), list(self._labels), list(self._labels.values())

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, text, labels=names)
            family.add_metric(values, value)
            return family

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(name, text, labels=names)
            family.add_metric(values, value)
            return family

        space = self._namespace
        for name, (text, of) in _GAUGES.items():
            yield gauge(f"{space}:{name}", text, of(stats))
        waiting = max(0, self._num_open() - stats.num_running)
        yield gauge(f"{space}:num_requests_waiting", "Samples that have no row yet, or no longer.", waiting)
        for name, (text, of) in _COUNTERS.items():
            yield counter(f"{space}:{name}", text, of(stats))
        yield self._by_reason(names, values)
        for name, (text, _) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"{space}:{name}", text, labels=names)
            self._histograms[name].write(family, values)
            yield family

        for name, (text, of) in _OWN_GAUGES.items():
            yield gauge(f"{_OWN}:{name}", text, of(stats))
        for name, (text, of) in _OWN_COUNTERS.items():
            yield counter(f"{_OWN}:{name}", text, of(stats))
        text = "Bytes of outputs that were not sent yet, about."
        yield gauge(f"{_OWN}:answer_bytes", text, self._answer_bytes())
        text = "Compilations and captures after warm-up."
        yield counter(f"{_OWN}:recompilations", text, self._num_recompiles())
        text = "Lines that could not be written to a log."
        yield counter(f"{_OWN}:lost_log_lines", text, self._lost_lines)
        phases = CounterMetricFamily(f"{_OWN}:steps", "Steps by phase.", labels=[*names, "phase"])
        for phase, count in sorted(stats.steps.items()):
            phases.add_metric([*values, phase], count)
        yield phases
        yield self._http()

    def _by_reason(self, names: list[str], values: list[str]) -> Metric:
        family = CounterMetricFamily(
            f"{self._namespace}:request_success",
            "Choices that ended, by the reason.",
            labels=[*names, "finished_reason"],
        )
        for reason in ("stop", "length", "abort", "error"):
            family.add_metric([*values, reason], self._ended[reason])
        return family

    def _http(self) -> Metric:
        family = CounterMetricFamily(
            "http_requests", "Responses by method, path and status.", labels=["method", "handler", "status"]
        )
        for labels, count in sorted(self._responses.items()):
            family.add_metric(labels, count)
        return family


def _usage(stats: EngineStats) -> float:
    if stats.total_blocks:
        return stats.used_blocks / stats.total_blocks
    return stats.used_rows / max(1, stats.total_rows)


Count = Callable[[str, str, int], None]
"""Called with method, path of the route, and status."""

_UNKNOWN = "other"


class CountingMiddleware:
    """Tells of each response.

    Args:
        app: behind it.
        count: told.
    """

    def __init__(self, app: ASGIApp, count: Count) -> None:
        self._app, self._count = app, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Paths of callers are without number; routes are few.
                route = scope.get("route")
                path = getattr(route, "path", _UNKNOWN)
                method = scope["method"] if path != _UNKNOWN else _UNKNOWN
                self._count(method, path, message["status"])
            await send(message)

        await self._app(scope, receive, counted)

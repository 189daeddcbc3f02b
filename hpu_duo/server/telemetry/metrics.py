"""Metrics of a server, for Prometheus.

Metrics with the meaning of vLLM's have its names, with a configurable prefix; see docs/server.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

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
    """A histogram: numbers of observations up to each of some bounds.

    Only one thread adds to it; others may read, possibly one observation late.

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
        """Add the samples of the histogram to a family of metrics."""
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts):
            total += count
            buckets.append((floatToGoString(bound), total))
        family.add_metric(labels, buckets, self._sum)


_SHORT_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 10),
)
_LONG_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_CALL_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20)

GAUGE, COUNTER, HISTOGRAM = GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily
_MODEL = ("model_name", "engine")
_REASONS = ("stop", "length", "abort", "error")
_VLLM = "vllm:"
"""Prefix of those that mean what vLLM's mean; replaced by the namespace of the server."""

Values: TypeAlias = Mapping[tuple[str, ...], float]
"""Numbers by the values of those labels that are not the model's."""


class Row(NamedTuple):
    """A metric.

    Attributes:
        name: with its prefix, and without the suffix of its kind.
        kind: class of its family.
        value: path of an attribute of ``EngineStats``, 0 where a part of it is None; bounds of a histogram
            that calls are added to; or a function of statistics and server.
        help: one sentence.
        labels: names of labels.
    """

    name: str
    kind: type[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]
    value: str | tuple[float, ...] | Callable[[EngineStats, ServerMetrics], float | Values]
    help: str
    labels: tuple[str, ...] = _MODEL


# fmt: off
METRICS = (
    Row("vllm:num_requests_running", GAUGE, "num_running", "Samples that run."),
    Row("vllm:num_requests_waiting", GAUGE, lambda s, server: max(0, server.num_open() - s.num_running),
        "Samples that wait, preempted ones included."),
    Row("vllm:kv_cache_usage_perc", GAUGE, lambda stats, _: _usage(stats),
        "Share of the KV blocks that are allocated; of the rows if no head stores blocks. 1 is all."),
    Row("vllm:num_preemptions", COUNTER, "num_preemptions",
        "Preemptions of requests for lack of blocks."),
    Row("vllm:prompt_tokens", COUNTER, "num_prompt_tokens",
        "Prompt tokens computed, again after a preemption."),
    Row("vllm:generation_tokens", COUNTER, "num_output_tokens", "Tokens sampled."),
    Row("vllm:prefix_cache_queries", COUNTER, "prefixes.num_queried_tokens",
        "Tokens of requests that were looked up in the prefix cache."),
    Row("vllm:prefix_cache_hits", COUNTER, "prefixes.num_hit_tokens",
        "Tokens of requests that hit the prefix cache."),
    Row("vllm:request_success", COUNTER,
        lambda _, server: {(reason,): server.num_ended[reason] for reason in _REASONS},
        "Choices that ended, by the reason.", (*_MODEL, "finished_reason")),
    Row("vllm:time_to_first_token_seconds", HISTOGRAM, _LONG_S,
        "From the arrival of a call to the first token of each choice."),
    Row("vllm:inter_token_latency_seconds", HISTOGRAM, _SHORT_S, "Between tokens of a choice."),
    Row("vllm:e2e_request_latency_seconds", HISTOGRAM, _CALL_S,
        "From the arrival of a call to the end of its answer."),
    Row("vllm:request_queue_time_seconds", HISTOGRAM, _LONG_S,
        "From the arrival of a call to the admission of its first prompt."),
    Row("vllm:request_prefill_time_seconds", HISTOGRAM, _LONG_S,
        "From the admission of a call's first prompt to its first token."),
    Row("vllm:request_inference_time_seconds", HISTOGRAM, _CALL_S,
        "From the admission of a call's first prompt to its last token."),
    Row("vllm:request_decode_time_seconds", HISTOGRAM, _CALL_S,
        "From the first to the last token of a call."),
    Row("vllm:request_time_per_output_token_seconds", HISTOGRAM, _SHORT_S,
        "Mean time between the tokens of a call."),
    Row("vllm:request_prompt_tokens", HISTOGRAM, _TOKENS, "Prompt tokens of a call."),
    Row("vllm:request_generation_tokens", HISTOGRAM, _TOKENS, "Tokens generated for a call."),
    Row("vllm:request_params_max_tokens", HISTOGRAM, _TOKENS, "max_tokens of a call, where it has one."),
    Row("vllm:request_params_n", HISTOGRAM, _CHOICES, "Choices of a call."),
    Row("vllm:spec_decode_num_drafts", COUNTER, "speculation.num_drafts",
        "Rows of steps that verified drafts."),
    Row("vllm:spec_decode_num_draft_tokens", COUNTER, "num_drafted_tokens", "Draft tokens verified."),
    Row("vllm:spec_decode_num_accepted_tokens", COUNTER, "num_accepted_tokens", "Draft tokens accepted."),
    Row("vllm:spec_decode_num_accepted_tokens_per_pos", COUNTER, lambda stats, _: _accepted(stats),
        "Draft tokens accepted, by their place in the draft.", (*_MODEL, "position")),
    Row("hpuduo:blocks_used", GAUGE, "used_blocks", "KV blocks allocated."),
    Row("hpuduo:blocks_total", GAUGE, "total_blocks", "KV blocks."),
    Row("hpuduo:rows_used", GAUGE, "used_rows", "Rows allocated."),
    Row("hpuduo:rows_total", GAUGE, "total_rows", "Rows."),
    Row("hpuduo:kv_store_bytes", GAUGE, "kv_bytes", "Bytes of the stores of keys and values."),
    Row("hpuduo:kv_token_bytes", GAUGE, "resolved.token_bytes",
        "Bytes of one more token in the blocks of all layers."),
    Row("vllm:cache_config_info", GAUGE,
        lambda s, _: {(str(s.resolved.limits.block_size), s.resolved.kv_cache_dtype): 1.0},
        "Tokens of a block, and formats of keys and values.", (*_MODEL, "block_size", "cache_dtype")),
    Row("hpuduo:kv_clipped_values", COUNTER, "num_clipped_values",
        "Elements of keys and values of prompts beyond the range of a format with constant scales."),
    Row("hpuduo:kv_held_bytes", GAUGE, "held_bytes", "Bytes of the allocated blocks and rows."),
    Row("vllm:external_prefix_cache_queries", COUNTER, "offload.num_queried_tokens",
        "Tokens of requests that were looked for in host memory and on disk."),
    Row("vllm:external_prefix_cache_hits", COUNTER, "offload.num_hit_tokens",
        "Tokens of requests that were loaded from host memory instead of computed."),
    Row("hpuduo:offload_records", GAUGE, lambda stats, _: _records(stats),
        "Blocks and snapshots of the prefix cache, by tier and by the way that they go.",
        (*_MODEL, "tier", "state")),
    Row("hpuduo:offload_transfers", GAUGE, "offload.num_transfers",
        "Copies between device and host that have not ended."),
    Row("hpuduo:offload_used_bytes", GAUGE, "offload.used_bytes", "Host memory with blocks and snapshots."),
    Row("hpuduo:offload_stored_bytes", COUNTER, "offload.stored_bytes", "Bytes copied to the host."),
    Row("hpuduo:offload_loaded_bytes", COUNTER, "offload.loaded_bytes", "Bytes copied from the host."),
    Row("hpuduo:offload_stored_seconds", COUNTER, "offload.stored_s",
        "Seconds of copies to the host, beside steps."),
    Row("hpuduo:offload_loaded_seconds", COUNTER, "offload.loaded_s",
        "Seconds of copies from the host, beside steps."),
    Row("hpuduo:offload_busy", COUNTER, "offload.num_busy",
        "Blocks and snapshots lost because transfers or host memory were busy."),
    Row("hpuduo:offload_evicted", COUNTER, "offload.num_evicted",
        "Blocks and snapshots evicted from host memory."),
    Row("hpuduo:offload_declined", COUNTER, "offload.num_computed",
        "Prefixes that were predicted to be computed faster than loaded."),
    Row("hpuduo:offload_abandoned", COUNTER, "offload.num_abandoned",
        "Loads that ended early, for lack of blocks or records."),
    Row("hpuduo:offload_damaged", COUNTER, "offload.num_damaged",
        "Records in host memory with another checksum, which were dropped."),
    Row("hpuduo:offload_swapped_out", COUNTER, "offload.swap.num_out",
        "Preempted requests that were copied to host memory."),
    Row("hpuduo:offload_swapped_in", COUNTER, "offload.swap.num_in",
        "Preempted requests that have come back from host memory."),
    Row("hpuduo:offload_swap_recomputed", COUNTER, "offload.swap.num_recomputed",
        "Preempted requests that were not swapped: no room, or predicted to be slower."),
    Row("hpuduo:offload_swap_lost", COUNTER, "offload.swap.num_lost",
        "Swapped requests that are computed again after an error."),
    Row("hpuduo:offload_swap_damaged", COUNTER, "offload.swap.num_damaged",
        "Swapped requests of which a record in host memory had another checksum."),
    Row("hpuduo:offload_disk_used_bytes", GAUGE, "offload.disk.used_bytes", "Records on disk."),
    Row("hpuduo:offload_disk_hit_tokens", COUNTER, "offload.disk.counters.num_hit_tokens",
        "Tokens of blocks that were read from the disk for requests."),
    Row("hpuduo:offload_disk_written_bytes", COUNTER, "offload.disk.counters.written_bytes",
        "Bytes of records that were written to the disk."),
    Row("hpuduo:offload_disk_written_seconds", COUNTER, "offload.disk.counters.written_s",
        "Seconds of these writes."),
    Row("hpuduo:offload_disk_late", COUNTER, "offload.disk.counters.num_late",
        "Records that left host memory before they were written."),
    Row("hpuduo:offload_disk_dropped", COUNTER, "offload.disk.counters.num_dropped",
        "Records of segments that were dropped for later ones."),
    Row("hpuduo:offload_disk_read_bytes", COUNTER, "offload.disk.counters.read_bytes",
        "Bytes of records that were read from the disk."),
    Row("hpuduo:offload_disk_read_seconds", COUNTER, "offload.disk.counters.read_s",
        "Seconds of these reads, of all threads."),
    Row("hpuduo:offload_disk_damaged", COUNTER, "offload.disk.counters.num_damaged",
        "Records on disk with another checksum, which are not used."),
    Row("hpuduo:offload_disk_foreign", GAUGE, "offload.disk.counters.num_foreign",
        "Files of other models in the folder, which are ignored."),
    Row("hpuduo:offload_disk_failures", COUNTER, "offload.disk.counters.num_failures",
        "Errors of the disk: after one nothing is read or written."),
    Row("hpuduo:prefix_idle_bytes", GAUGE, "prefixes.idle_bytes",
        "Bytes of cached blocks that no request uses."),
    Row("hpuduo:prefix_context_bytes", GAUGE, "prefixes.context_bytes",
        "Bytes of blocks that contexts pin."),
    Row("hpuduo:prefix_snapshot_bytes", GAUGE, "prefixes.snapshot_bytes", "Bytes of snapshots of rings."),
    Row("hpuduo:kv_full_attention_bytes", GAUGE, "full_attention_bytes",
        "Bytes of the same tokens if every head stored them all."),
    Row("hpuduo:query_tokens", COUNTER, "num_query_tokens", "Query tokens of all steps, padding included."),
    Row("hpuduo:padded_tokens", COUNTER, "num_padded_tokens", "Query tokens that were padding."),
    Row("hpuduo:bucket_misses", COUNTER, "num_graph_misses", "Steps with a shape that fits no bucket."),
    Row("hpuduo:late_captures", COUNTER, "num_late_captures",
        "Planned buckets captured when a request needed them."),
    Row("hpuduo:replan_captures", COUNTER, "replanned.num_captured",
        "Buckets captured while serving, of tables that were planned again."),
    Row("hpuduo:replan_capture_seconds", COUNTER, "replanned.capture_s", "Seconds that these captures took."),
    Row("hpuduo:replan_padding_before", GAUGE, "replanned.padding_before",
        "Predicted padding of sampled steps before the table was last planned again; 1 doubles their cost."),
    Row("hpuduo:replan_padding", GAUGE, "replanned.padding", "The same in the current table."),
    Row("hpuduo:uncaptured_steps", COUNTER, "num_uncaptured_steps",
        "Steps of buckets too long to be captured."),
    Row("hpuduo:prefix_tokens_lost_to_snapshots", COUNTER, "prefixes.num_lost_to_snapshots",
        "Tokens in cached blocks that could not be reused for lack of a snapshot of rings."),
    Row("hpuduo:prefix_tokens_lost_to_blocks", COUNTER, "prefixes.num_lost_to_blocks",
        "Tokens that had been in cached blocks, which were evicted to make room."),
    Row("hpuduo:prefix_blocks_evicted", COUNTER, "prefixes.num_evicted_blocks",
        "Cached blocks evicted to make room."),
    Row("hpuduo:prefix_snapshots_evicted", COUNTER, "prefixes.num_evicted_snapshots",
        "Snapshots of rings evicted to make room."),
    Row("hpuduo:step_host_seconds", COUNTER, "host_s", "Seconds spent planning and building steps."),
    Row("hpuduo:step_device_seconds", COUNTER, "device_s", "Seconds spent running steps."),
    Row("hpuduo:rank_broadcasts", COUNTER, "ranks.num_broadcasts",
        "Broadcasts of rank 0 to the other ranks of the model."),
    Row("hpuduo:rank_broadcast_bytes", COUNTER, "ranks.broadcast_bytes", "Bytes of these broadcasts."),
    Row("hpuduo:rank_reduced_bytes", COUNTER, "ranks.reduced_bytes",
        "Bytes that a rank has sent in all-reduces."),
    Row("hpuduo:rank_gathered_bytes", COUNTER, "ranks.gathered_bytes",
        "Bytes that a rank has sent in all-gathers."),
    Row("hpuduo:rank_scattered_bytes", COUNTER, "ranks.scattered_bytes",
        "Bytes that a rank has sent in all-to-all exchanges."),
    Row("hpuduo:copied_bytes", COUNTER, "bytes_copied", "Bytes of step messages, copied to the device."),
    Row("hpuduo:answer_bytes", GAUGE, lambda _, server: server.answer_bytes(),
        "Estimated bytes of outputs that are not sent yet."),
    Row("hpuduo:recompilations", COUNTER, lambda _, server: server.num_recompiles(),
        "Compilations and captures after warm-up."),
    Row("hpuduo:lost_log_lines", COUNTER, lambda _, server: server.num_lost_lines,
        "Lines that could not be written to a log."),
    Row("hpuduo:steps", COUNTER, lambda s, _: {(phase,): count for phase, count in sorted(s.steps.items())},
        "Steps by phase.", (*_MODEL, "phase")),
    Row("http_requests", COUNTER, lambda _, server: dict(sorted(server.num_responses.items())),
        "Responses by method, path and status.", ("method", "handler", "status")),
)
"""Every metric, in the order in which they are shown."""
# fmt: on


class ServerMetrics(Collector):
    """Counters of calls, and metrics from the engine's statistics.

    Args:
        model: label of all metrics.
        stats: recent statistics of the engine.
        num_open: unfinished samples.
        num_recompiles: compilations and captures after warm-up.
        answer_bytes: of outputs of calls under way.
        namespace: prefix of those that are called as vLLM's.

    Attributes:
        num_ended: choices by the reason of their end.
        num_responses: by method, path and status.
        num_lost_lines: lines that could not be written to a log.
    """

    num_open: Callable[[], int]
    num_recompiles: Callable[[], int]
    answer_bytes: Callable[[], int]
    num_lost_lines: int

    def __init__(
        self,
        model: str,
        stats: Callable[[], EngineStats],
        num_open: Callable[[], int],
        num_recompiles: Callable[[], int],
        answer_bytes: Callable[[], int],
        namespace: str = "hpuduo",
    ) -> None:
        self._stats, self.num_open, self.num_recompiles = stats, num_open, num_recompiles
        self.answer_bytes, self._prefix, self._of_model = answer_bytes, f"{namespace}:", (model, "0")
        self._histograms = {row.name: Histogram(row.value) for row in METRICS if isinstance(row.value, tuple)}
        self._first = self._histograms["vllm:time_to_first_token_seconds"]
        self._next = self._histograms["vllm:inter_token_latency_seconds"]
        self.num_ended: Counter[str] = Counter()
        self.num_responses: Counter[tuple[str, ...]] = Counter()
        self.num_lost_lines = 0

    def first_token(self, seconds: float) -> None:
        """See ``TokenWatch``."""
        self._first.add(seconds)

    def next_token(self, seconds: float) -> None:
        """See ``TokenWatch``."""
        self._next.add(seconds)

    def responded(self, method: str, path: str, status: int) -> None:
        """Count a response."""
        self.num_responses[method, path, str(status)] += 1

    def lost_line(self) -> None:
        """Count a line that could not be written to a log."""
        self.num_lost_lines += 1

    def ended(self, record: CallRecord) -> None:
        """Count an accepted call."""
        plan = record.plan
        if not record.is_opened or plan is None or plan.params is None:
            return
        self.num_ended.update(record.reasons)
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
        self._histograms[_VLLM + name].add(value)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, for Prometheus' client."""
        stats = self._stats()
        for row in METRICS:
            name = self._prefix + row.name.removeprefix(_VLLM) if row.name.startswith(_VLLM) else row.name
            family = row.kind(name, row.help, labels=row.labels)
            if isinstance(family, HistogramMetricFamily):
                self._histograms[row.name].write(family, self._of_model)
            else:
                first = self._of_model if row.labels[: len(_MODEL)] == _MODEL else ()
                for labels, value in self._values(row, stats).items():
                    family.add_metric((*first, *labels), value)
            yield family

    def _values(self, row: Row, stats: EngineStats) -> Values:
        if isinstance(row.value, str):
            return {(): _read(stats, row.value)}
        assert callable(row.value), "a histogram has no value"
        found = row.value(stats, self)
        return found if isinstance(found, Mapping) else {(): found}


def _read(stats: EngineStats, path: str) -> float:
    found: Any = stats
    for name in path.split("."):
        found = getattr(found, name)
        if found is None:
            return 0
    return float(found)


def _accepted(stats: EngineStats) -> Values:
    found = () if stats.speculation is None else stats.speculation.num_accepted_tokens_per_pos
    return {(str(place),): count for place, count in enumerate(found)}


def _records(stats: EngineStats) -> Values:
    if (found := stats.offload) is None:
        return {}
    disk = found.disk
    num_reading, num_writing = (0, 0) if disk is None else (disk.num_reading, disk.num_writing)
    present = found.num_records - found.num_leaving - num_reading - num_writing
    by_place: dict[tuple[str, ...], float] = {
        ("device", "present"): float(found.num_cached),
        ("device", "leaving"): float(found.num_leaving),
        ("host", "present"): float(max(0, present)),
        ("host", "to_device"): float(found.num_loading),
    }
    if disk is not None:
        by_place["host", "to_disk"] = float(num_writing)
        by_place["disk", "present"] = float(disk.num_records)
        by_place["disk", "to_host"] = float(num_reading)
    return by_place


def _usage(stats: EngineStats) -> float:
    if stats.total_blocks:
        return stats.used_blocks / stats.total_blocks
    return stats.used_rows / max(1, stats.total_rows)


Count = Callable[[str, str, int], None]
"""Called with method, path of the route, and status."""

_UNKNOWN = "other"


class CountingMiddleware:
    """Middleware that counts responses.

    Args:
        app: the next application.
        count: called for each response.
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
                # By route, since the number of paths is unbounded.
                route = scope.get("route")
                path = getattr(route, "path", _UNKNOWN)
                method = scope["method"] if path != _UNKNOWN else _UNKNOWN
                self._count(method, path, message["status"])
            await send(message)

        await self._app(scope, receive, counted)

"""A run as JSON, in the fields of vLLM's ``bench serve`` where it has them; see ``docs/bench-serve.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpu_duo.lab.load.outcome import Outcome
from hpu_duo.lab.load.summary import Summary

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

"""Traces for OpenTelemetry: one span per call, below that of the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from hpu_duo import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

    from hpu_duo.server.telemetry.request_log import CallRecord


class Tracing:
    """Exports a span for each completed call, in the background.

    A call with a ``traceparent`` header (W3C Trace Context) gets a span below that one. Names of attributes
    are those of OpenTelemetry's conventions for generative models, and vLLM's where they have none.

    Args:
        endpoint: URL of an OTLP/HTTP collector, such as ``http://localhost:4318/v1/traces``.
        processor: of spans, in place of the endpoint.
    """

    def __init__(self, endpoint: str, processor: SpanProcessor | None = None) -> None:
        # A separate provider: the global one may belong to other code.
        resource = Resource.create({"service.name": "hpu-duo", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)) if processor is None else processor
        )
        self._tracer = self._provider.get_tracer("hpu_duo.server", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def add(self, record: CallRecord) -> None:
        """Export a call as a span."""
        end = int(record.ended_at * 1e9)
        start = end - int(record.seconds * 1e9)
        span = self._tracer.start_span(
            f"POST {record.path}",
            context=self._propagator.extract(record.headers),
            kind=SpanKind.SERVER,
            start_time=start,
            attributes=_attributes(record),
        )
        first = record.timing.first
        if first is not None:
            span.add_event("first token", timestamp=start + int((first - record.timing.arrived) * 1e9))
        if record.error is not None:
            # Messages may quote the call.
            span.set_status(Status(StatusCode.ERROR, record.error.code))
        span.end(end)

    def close(self) -> None:
        """Export queued spans, and close."""
        self._provider.shutdown()


def _attributes(record: CallRecord) -> dict[str, Any]:
    status = 200 if record.error is None else record.error.status
    found: dict[str, Any] = {"url.path": record.path, "http.response.status_code": status}
    plan = record.plan
    if plan is None:
        return found
    usage, params, timing = plan.answer.usage, plan.params, record.timing
    found |= {
        "gen_ai.response.id": plan.answer_id,
        "gen_ai.request.model": plan.model,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.response.finish_reasons": record.reasons,
        "gen_ai.latency.e2e": record.seconds,
    }
    if timing.admitted is not None and timing.first is not None and timing.last is not None:
        found |= {
            "gen_ai.latency.time_in_queue": timing.admitted - timing.arrived,
            "gen_ai.latency.time_in_model_prefill": timing.first - timing.admitted,
            "gen_ai.latency.time_in_model_decode": timing.last - timing.first,
            "gen_ai.latency.time_in_model_inference": timing.last - timing.admitted,
        }
    if timing.first is not None:
        found["gen_ai.latency.time_to_first_token"] = timing.first - timing.arrived
    if params is not None:
        found |= {
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.choice.count": params.n,
        }
        if params.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = params.max_tokens
    return found

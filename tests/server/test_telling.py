"""Lines and spans of calls say what happened, and nothing of what was said."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from hpu_duo.server.service import Sink
from hpu_duo.server.telemetry.request_log import RequestLog
from hpu_duo.server.telemetry.tracing import Tracing
from tests.server.conftest import TinyChat
from tests.server.live import HOST, Live, live, wait_until

SECRET = "Pssst-a-secret!"
ASKED: dict[str, Any] = {"model": "tiny", "prompt": SECRET, "max_tokens": 5, "temperature": 0, "user": "ann"}


def make_calls(server: Live, answers: list[str]) -> None:
    """One whole answer, one stream, one chat, one refusal."""
    client = server.client()
    answers.append(client.completions.create(**ASKED).choices[0].text)
    list(client.completions.create(**ASKED, stream=True))
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": SECRET}], max_tokens=2)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(**{**ASKED, "prompt": SECRET * 20})


@contextmanager
def telling(tiny: TinyChat, *sinks: Sink) -> Iterator[Live]:
    with live(tiny.load(), sinks=sinks) as server:
        yield server


def test_each_call_is_a_line_without_what_was_said(tiny: TinyChat, tmp_path: Path) -> None:
    file, answers = tmp_path / "calls.jsonl", list[str]()
    log = RequestLog(file)
    with telling(tiny, log.add) as server:
        make_calls(server, answers)
    log.close()
    text = file.read_text()
    assert SECRET not in text
    assert answers[0] not in text
    whole, stream, chat, refused = map(json.loads, text.splitlines())
    assert whole["user"] == "ann"
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (len(SECRET), 5)
    assert whole["finish_reasons"] == ["length"]
    assert 0 <= whole["queue_seconds"] < whole["first_token_seconds"] <= whole["seconds"]
    assert (whole["stream"], stream["stream"]) == (False, True)
    assert stream["completion_tokens"] == 5
    assert chat["path"] == "/v1/chat/completions"
    assert refused["queue_seconds"] is refused["first_token_seconds"] is None
    assert (refused["status"], refused["error"], refused["param"]) == (
        400,
        "context_length_exceeded",
        "prompt",
    )


def test_prompts_are_written_when_they_are_asked_for(tiny: TinyChat, tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    log = RequestLog(file, has_prompts=True)
    with telling(tiny, log.add) as server:
        server.client().completions.create(**ASKED)
        server.client().completions.create(**{**ASKED, "prompt": [5, 6, 7]})
    log.close()
    assert [json.loads(line)["prompts"] for line in file.read_text().splitlines()] == [[SECRET], [[5, 6, 7]]]


def test_a_full_disk_loses_lines_and_nothing_else(tiny: TinyChat, caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(Path("/dev/full"))
    with telling(tiny, log.add) as server, caplog.at_level(logging.WARNING):
        log.on_lost = server.service.metrics.lost_line
        for _ in range(3):
            assert server.client().completions.create(**ASKED).choices
        wait_until(lambda: server.service.metrics.num_lost_lines == 3)
    log.close()
    assert len([one for one in caplog.records if "cannot be written" in one.message]) == 1


def test_each_call_is_a_span_below_its_callers(tiny: TinyChat) -> None:
    spans = InMemorySpanExporter()
    tracing = Tracing("http://127.0.0.1:9/v1/traces", SimpleSpanProcessor(spans))
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with telling(tiny, tracing.add) as server:
        client = server.client(default_headers={"traceparent": f"00-{trace}-{parent}-01"})
        client.completions.create(**ASKED)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**{**ASKED, "prompt": SECRET * 20})
        wait_until(lambda: len(spans.get_finished_spans()) == 2)
    done, refused = spans.get_finished_spans()
    assert done.context is not None
    assert f"{done.context.trace_id:032x}" == trace
    assert done.parent is not None
    assert f"{done.parent.span_id:016x}" == parent
    assert done.attributes is not None
    assert done.attributes["gen_ai.usage.output_tokens"] == 5
    assert done.attributes["gen_ai.request.max_tokens"] == 5
    queue, prefill, decode, inference = (
        done.attributes[f"gen_ai.latency.time_in_{part}"]
        for part in ("queue", "model_prefill", "model_decode", "model_inference")
    )
    assert prefill + decode == pytest.approx(inference)
    assert queue + prefill == pytest.approx(done.attributes["gen_ai.latency.time_to_first_token"])
    assert done.start_time is not None
    assert done.end_time is not None
    assert done.start_time < done.events[0].timestamp <= done.end_time
    assert refused.status.status_code is StatusCode.ERROR
    assert SECRET not in done.to_json() + refused.to_json()
    tracing.close()


@contextmanager
def collector(got: list[tuple[str, ExportTraceServiceRequest]]) -> Iterator[str]:
    """A collector of OTLP over HTTP on this machine; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer((HOST, 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{HOST}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_spans_reach_a_collector_over_http(tiny: TinyChat) -> None:
    got: list[tuple[str, ExportTraceServiceRequest]] = []
    with collector(got) as url:
        tracing = Tracing(f"{url}/v1/traces")
        with telling(tiny, tracing.add) as server:
            make_calls(server, [])
        tracing.close()
    assert {path for path, _ in got} == {"/v1/traces"}
    sent = [one for _, request in got for one in request.resource_spans]
    names = {(a.key, a.value.string_value) for one in sent for a in one.resource.attributes}
    assert ("service.name", "hpu-duo") in names
    spans = [span for one in sent for scope in one.scope_spans for span in scope.spans]
    assert sorted(span.name for span in spans) == ["POST /v1/chat/completions", *["POST /v1/completions"] * 3]
    assert SECRET.encode() not in b"".join(request.SerializeToString() for _, request in got)


def test_a_collector_that_is_not_there_keeps_no_call_waiting(tiny: TinyChat) -> None:
    tracing = Tracing(f"http://{HOST}:9/v1/traces")
    with telling(tiny, tracing.add) as server:
        assert server.client().completions.create(**ASKED).choices

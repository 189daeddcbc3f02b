"""Metrics count what has happened, under vLLM's names where they mean the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hpu_duo import SamplingParams
from hpu_duo.server.running.admission import Admission
from hpu_duo.server.telemetry.metrics import ServerMetrics
from hpu_duo.server.telemetry.request_log import CallRecord
from tests.server.conftest import TinyChat
from tests.server.live import Live, live, wait_until
from tests.server.test_pressure import slowed

ASKED: dict[str, Any] = {"model": "tiny", "prompt": "Once", "n": 2, "max_tokens": 5}

VLLM = {
    "gauge": ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"],
    "counter": ["num_preemptions", "prompt_tokens", "generation_tokens", "request_success"],
    "histogram": [
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_inference_time_seconds",
        "request_decode_time_seconds",
        "request_time_per_output_token_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_max_tokens",
        "request_params_n",
    ],
}


def samples(server: Live) -> dict[str, float]:
    """Values by name and labels, those of the model left out."""
    with server.http() as http:
        text = http.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + "".join(f",{k}={v}" for k, v in sorted(labels.items()))] = sample.value
    return found


def kinds(server: Live) -> dict[str, str]:
    with server.http() as http:
        families = text_string_to_metric_families(http.get("/metrics").text)
        return {family.name: family.type for family in families}


@pytest.mark.parametrize("namespace", ["hpuduo", "vllm"])
def test_names_and_kinds_are_those_of_vllm_behind_the_prefix(tiny: TinyChat, namespace: str) -> None:
    with live(tiny.load(), metrics_namespace=namespace) as server:
        found = kinds(server)
    for kind, names in VLLM.items():
        for name in names:
            assert found[f"{namespace}:{name}"] == kind
    assert found["hpuduo:padded_tokens"] == "counter"


def test_calls_are_counted(tiny: TinyChat) -> None:
    with live(tiny.load()) as server:
        client = server.client()
        client.completions.create(**ASKED)
        list(client.completions.create(**ASKED, stream=True))
        with server.http() as http:
            assert http.post("/v1/completions", json={"prompt": 5}).status_code == 400
            http.get("/nothing/of/that/name")
        wait_until(lambda: samples(server)["hpuduo:generation_tokens_total"] == 20)
        found = samples(server)
    assert found["hpuduo:request_success_total,finished_reason=length"] == 4
    assert found["hpuduo:time_to_first_token_seconds_count"] == 4
    assert found["hpuduo:inter_token_latency_seconds_count"] == 16
    assert found["hpuduo:e2e_request_latency_seconds_count"] == 2
    assert found["hpuduo:request_prompt_tokens_sum"] == 8
    assert found["hpuduo:request_generation_tokens_sum"] == 20
    assert found["hpuduo:request_params_n_bucket,le=2.0"] == 2
    assert found["hpuduo:num_requests_running"] == found["hpuduo:num_requests_waiting"] == 0
    assert found["hpuduo:rows_total"] == 4
    assert found["http_requests_total,handler=/v1/completions,method=POST,status=200"] == 2
    assert found["http_requests_total,handler=/v1/completions,method=POST,status=400"] == 1
    assert found["http_requests_total,handler=other,method=other,status=404"] == 1
    steps = sum(value for name, value in found.items() if name.startswith("hpuduo:steps_total"))
    assert steps > 0
    assert found["hpuduo:query_tokens_total"] >= found["hpuduo:padded_tokens_total"]


def test_a_call_that_finds_no_room_is_no_call_that_ended(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(Admission, "ended", lambda _, num_samples: ended.append(num_samples))
    with live(tiny.load(max_num_seqs=2), max_queue=1) as server, ThreadPoolExecutor(1) as pool:
        slowed(server, 0.02, monkeypatch)
        client = server.client()
        running = pool.submit(client.completions.create, **ASKED)
        wait_until(lambda: server.service.engine.num_open == 2)
        with pytest.raises(openai.RateLimitError):  # there is room for one, and it wants two
            client.completions.create(**ASKED)
        running.result()
        wait_until(lambda: ended)
        found = samples(server)
    assert ended == [2]
    assert found["hpuduo:request_success_total,finished_reason=error"] == 0
    assert found["hpuduo:request_success_total,finished_reason=length"] == 2
    assert found["hpuduo:e2e_request_latency_seconds_count"] == 1
    assert found["http_requests_total,handler=/v1/completions,method=POST,status=429"] == 1


def test_buckets_of_histograms_are_cumulative(tiny: TinyChat) -> None:
    with live(tiny.load()) as server:
        server.client().completions.create(**ASKED)
        found = samples(server)
    for name in VLLM["histogram"]:
        values = [value for key, value in found.items() if key.startswith(f"hpuduo:{name}_bucket")]
        assert values == sorted(values)
        assert values[-1] == found[f"hpuduo:{name}_count"]


def test_a_call_is_in_the_queue_until_its_prompt_has_a_row(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[CallRecord] = []
    with live(tiny.load(max_num_seqs=1), sinks=(records.append,)) as server, ThreadPoolExecutor(2) as pool:
        slowed(server, 0.02, monkeypatch)
        client, calls = server.client(), []
        for number in (1, 2):
            calls.append(pool.submit(client.completions.create, **{**ASKED, "n": 1}))
            wait_until(lambda number=number: server.service.engine.num_open == number)
        [call.result() for call in calls]
        found = samples(server)

    def total(name: str) -> float:
        assert found[f"hpuduo:{name}_seconds_count"] == 2
        return found[f"hpuduo:{name}_seconds_sum"]

    first, second = (record.timing for record in records)
    assert first.arrived < second.arrived < first.last <= second.admitted
    waited = [one.admitted - one.arrived for one in (first, second)]
    assert total("request_queue_time") == pytest.approx(sum(waited))
    assert total("request_queue_time") + total("request_prefill_time") == pytest.approx(
        total("time_to_first_token")
    )
    parts = total("request_prefill_time") + total("request_decode_time")
    assert parts == pytest.approx(total("request_inference_time"))


def test_samples_of_a_prompt_wait_as_long_as_their_prompt(tiny: TinyChat) -> None:
    with live(tiny.load(max_num_seqs=2)) as server:
        server.client().completions.create(**{**ASKED, "n": 6})
        found = samples(server)
    assert found["hpuduo:request_queue_time_seconds_count"] == 1
    assert found["hpuduo:request_queue_time_seconds_sum"] < found["hpuduo:time_to_first_token_seconds_sum"]


def test_statistics_are_json(server: Live) -> None:
    server.client().completions.create(**ASKED)
    with server.http() as http:
        wait_until(lambda: http.get("/stats").json()["num_output_tokens"])
        stats = http.get("/stats").json()
        assert (stats["stage"], stats["total_rows"], stats["resolved"]["max_num_seqs"]) == ("ready", 4, 4)
        assert http.get("/version").json()["version"]


def test_the_schema_says_what_is_answered(server: Live) -> None:
    with server.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
        for path in ("/live", "/health", "/ready", "/version", "/stats", "/v1/models"):
            told = paths[path]["get"]["responses"]["200"].get("content", {})
            answer = http.get(path)
            assert answer.status_code == 200
            assert list(told) == ([answer.headers["content-type"]] if answer.content else [])


FROZEN = Path(__file__).parent / "frozen_metrics.txt"


def frozen(metrics: ServerMetrics) -> list[str]:
    """Help and type of each metric, with the labels of its samples."""
    registry = CollectorRegistry()
    registry.register(metrics)
    lines = []
    for metric in text_string_to_metric_families(generate_latest(registry).decode()):
        labels = {tuple(label for label in sample.labels if label != "le") for sample in metric.samples}
        lines.append(f"{metric.name} {metric.type} {sorted(labels)}: {metric.documentation}")
    return sorted(lines)


def test_names_labels_and_helps_are_those_that_dashboards_have(tiny: TinyChat) -> None:
    model = tiny.load()
    model.engine.generate([[5, 6, 7]], [SamplingParams(max_tokens=1)])
    metrics = ServerMetrics("tiny", model.stats, lambda: 0, lambda: 0, lambda: 0)
    metrics.responded("GET", "/health", 200)
    assert "\n".join(frozen(metrics)) == FROZEN.read_text(encoding="utf-8").strip()

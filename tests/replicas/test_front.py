"""The front process over real HTTP: what passes through, and what happens when replicas die."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import Response

from hpu_duo.fleet.replicas.relaying import has_run
from hpu_duo.fleet.routing import D2LPM
from hpu_duo.server.running.admission import AnswerMemoryFullError, Stage
from hpu_duo.server.running.stream import AnswerMemory
from tests.replicas.fronts import STUB, LiveFront, live_front
from tests.server.live import wait_until


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFront]:
    with live_front(tmp_path_factory.mktemp("front")) as running:
        yield running


@pytest.fixture
def http(front: LiveFront) -> Iterator[httpx.Client]:
    front.all_ready()
    with front.http() as client:
        yield client
    wait_until(lambda: front.front.router.num_open_requests == 0)


def ask(http: httpx.Client, prompt: str, **fields: object) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": prompt, **fields})


def events(http: httpx.Client, prompt: str) -> list[str]:
    """The data of all events of a stream."""
    text = ask(http, prompt, stream=True).text
    assert text.endswith("\n\n")
    return [each.removeprefix("data: ") for each in text.split("\n\n")[:-1]]


def test_answers_pass_through_with_their_headers(http: httpx.Client) -> None:
    headers = {"Authorization": "Bearer mine", "X-Request-Id": "one"}
    answer = http.post("/v1/completions?x=1", json={"prompt": "hello"}, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "one!"
    assert len(ask(http, "hello").headers["x-request-id"]) == 33
    assert answer.json()["key"] == "Bearer mine"
    assert http.get("/v1/models").text in ("0", "1")


def test_streams_pass_through_to_their_end(http: httpx.Client) -> None:
    found = events(http, "hello")
    assert [json.loads(each)["number"] for each in found[:3]] == [0, 1, 2]
    assert found[-1] == "[DONE]"


def test_calls_are_spread(http: httpx.Client) -> None:
    assert {ask(http, "hello").json()["replica"] for _ in range(4)} == {"0", "1"}


def test_a_stream_whose_replica_dies_ends_with_an_error_and_never_as_complete(
    http: httpx.Client, front: LiveFront
) -> None:
    before = sum(each.num_restarts for each in front.front.replicas.values())
    found = events(http, "break")
    assert [json.loads(each).get("number") for each in found[:3]] == [0, 1, 2]
    assert json.loads(found[3])["error"]["code"] == "replica_lost"
    assert len(found) == 4
    assert "[DONE]" not in found
    assert ask(http, "hello").status_code == 200  # the other one serves
    wait_until(lambda: sum(each.num_restarts for each in front.front.replicas.values()) == before + 1)


@pytest.mark.slow
def test_a_replica_that_hangs_is_killed_and_its_stream_ends_with_an_error(
    http: httpx.Client, front: LiveFront
) -> None:
    """Three health checks of five seconds are without an answer."""
    with http.stream("POST", "/v1/completions", json={"prompt": "endless", "stream": True}) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        name = json.loads(first.removeprefix("data: "))["replica"]
        (hung,) = (each for each in front.front.replicas.values() if each.name == name)
        assert hung.pid is not None
        before = hung.num_restarts
        os.kill(hung.pid, signal.SIGSTOP)
        assert ask(http, "hello").json()["replica"] != name
        *_, last = (line for line in lines if line)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"
    wait_until(lambda: hung.num_restarts == before + 1)


def test_a_stream_that_ends_without_its_last_event_is_not_complete(http: httpx.Client) -> None:
    found = events(http, "short")
    assert json.loads(found[-1])["error"]["code"] == "replica_lost"


def test_an_error_that_a_replica_tells_in_a_stream_is_passed_on_alone(http: httpx.Client) -> None:
    found = events(http, "failed")
    assert json.loads(found[-1]) == {"error": {"code": "internal_error"}}


@pytest.mark.parametrize(("prompt", "fields"), [("die", {}), ("die", {"stream": True}), ("cut", {})])
def test_a_call_that_kills_its_replicas_is_answered_with_an_error_and_kills_two_at_most(
    tmp_path: Path, prompt: str, fields: dict[str, object]
) -> None:
    with live_front(tmp_path) as front, front.http() as http:
        answer = ask(http, prompt, **fields)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "replica_lost"
        assert front.front.counts.num_broken == 2
        assert front.front.counts.num_retries == 1
        while (answer := ask(http, "hello")).status_code != 200:
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
        front.all_ready()
        assert sum(each.num_restarts for each in front.front.replicas.values()) == 2


def test_a_call_goes_to_another_replica_where_one_is_full_or_has_died(
    http: httpx.Client, front: LiveFront
) -> None:
    assert {ask(http, "full0").json()["replica"] for _ in range(3)} == {"1"}
    full = ask(http, "full")
    assert (full.status_code, full.headers["retry-after"]) == (429, "7")
    assert full.json() == {"error": {"code": "rate_limit"}}
    killed = front.front.replicas["0"].pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    assert [ask(http, "hello").status_code for _ in range(4)] == [200] * 4
    wait_until(lambda: front.front.replicas["0"].pid not in (None, killed))


def test_a_caller_who_leaves_is_told_to_the_replica(http: httpx.Client, front: LiveFront) -> None:
    before = front.notes.read_text()
    with http.stream("POST", "/v1/completions", json={"prompt": "endless", "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert front.front.router.num_open_requests == 1
    wait_until(lambda: front.front.router.num_open_requests == 0)
    wait_until(lambda: front.notes.read_text() != before)
    assert front.front.counts.num_open == 0


def test_a_caller_who_leaves_pays_for_what_came(tmp_path: Path) -> None:
    with live_front(tmp_path, router="d2lpm:quantum=1") as front, front.http() as http:
        asked = {"prompt": "endless", "stream": True, "user": "ann"}
        with http.stream("POST", "/v1/completions", json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)
        router = front.front.router
        wait_until(lambda: router.num_open_requests == 0)
        assert isinstance(router, D2LPM)
        assert min(router.credit("ann", replica) for replica in "01") < 0


def test_metrics_have_the_replica_as_a_label_and_those_of_the_router(http: httpx.Client) -> None:
    ask(http, "counted")
    families = {each.name: each for each in text_string_to_metric_families(http.get("/metrics").text)}
    labels = [each.labels for each in families["steps"].samples]
    assert labels == [{"phase": "p", "replica": "0"}, {"phase": "p", "replica": "1"}]
    up = families["hpuduo:replica_up"].samples
    assert [(each.labels["replica"], each.value) for each in up] == [("0", 1.0), ("1", 1.0)]
    assert sum(each.value for each in families["hpuduo:router_requests"].samples) >= 1
    assert sum(each.value for each in families["hpuduo:router_hit_tokens"].samples) > 0
    assert any(each.labels["replica"] == "front" for each in families["http_requests"].samples)
    for name in ("replica_restarts", "router_load", "router_open_requests", "router_retries"):
        assert f"hpuduo:{name}" in families


def test_the_state_is_that_of_all(http: httpx.Client) -> None:
    assert [http.get(path).status_code for path in ("/live", "/health", "/ready")] == [200, 200, 200]
    fields = http.get("/stats").json()
    assert (fields["model"], fields["stage"], fields["router"]) == ("stub", "ready", "least-loaded")
    assert (fields["num_open"], fields["max_open"], fields["num_ready"]) == (2, 16, 2)
    assert [each["stats"]["model"] for each in fields["replicas"]] == ["stub", "stub"]


def test_keys_and_limits_hold_before_any_replica(tmp_path: Path) -> None:
    with live_front(tmp_path, api_keys=("secret",), max_body_bytes=100) as front, front.http() as http:
        assert ask(http, "hello").status_code == 401
        http.headers["Authorization"] = "Bearer secret"
        assert ask(http, "hello").status_code == 200
        assert ask(http, "x" * 200).status_code == 413
        assert sum(front.front.counts.requests.values()) == 1


def test_keys_of_metrics_hold_before_and_at_replicas(tmp_path: Path) -> None:
    with live_front(tmp_path, metrics_api_keys=("scrape",)) as front, front.http() as http:
        assert [http.get(path).status_code for path in ("/metrics", "/stats", "/stats/")] == [401] * 3
        assert http.get("/health/").status_code == 200
        http.headers["Authorization"] = "Bearer scrape"
        assert "replica=" in http.get("/metrics").text
        assert {each["stats"]["key"] for each in http.get("/stats").json()["replicas"]} == {"Bearer scrape"}


@pytest.mark.parametrize("shares", [False, True])
def test_callers_with_different_keys_are_routed_as_sharing_what_replicas_let_them(
    tmp_path: Path, shares: bool
) -> None:
    settings: dict[str, Any] = {"api_keys": ("a", "b"), "shares_prefixes": shares, "router": "cache-aware"}
    with live_front(tmp_path, **settings) as front, front.http() as http:
        found = [0.0]
        for key in ("a", "b", "a"):
            http.headers["Authorization"] = f"Bearer {key}"
            assert ask(http, "x" * 4000).status_code == 200
            found.append(sum(front.front.counts.expected_tokens.values()))
    assert [after > before for before, after in pairwise(found)] == [False, shares, True]


def test_calls_under_way_end_before_the_server_does(tmp_path: Path) -> None:
    with live_front(tmp_path) as front, front.http() as http:
        asked = {"prompt": "wait", "stream": True}
        with http.stream("POST", "/v1/completions", json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)
            front.signal()
            wait_until(lambda: front.front.stage is Stage.DRAINING)
            with front.http() as other:
                assert ask(other, "hello").status_code == 503
            front.notes.write_text("go on")
            assert "data: [DONE]" in list(lines)
        assert front.join()
        assert front.server.ending.is_drained


def test_a_wrong_command_ends_the_server_at_once(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("raise SystemExit(2)")
    front = LiveFront(tmp_path, wrong, wrong)
    assert front.join()
    assert front.server.ending.signal_number is None


def test_no_replica_is_answered_with_503_until_one_is_ready(tmp_path: Path) -> None:
    late = tmp_path / "late.py"
    late.write_text("import sys; sys.stdin.read()")
    front = LiveFront(tmp_path, late)
    try:
        with front.http() as http:
            answer = ask(http, "hello")
            assert (answer.status_code, http.get("/ready").status_code) == (503, 503)
            assert (http.get("/live").status_code, http.get("/health").status_code) == (200, 503)
            assert "no replica is ready" in answer.json()["error"]["message"]
    finally:
        front.signal()
        assert front.join()


def test_a_replica_that_hangs_while_it_loads_is_started_again_and_no_process_of_it_is_left(
    tmp_path: Path,
) -> None:
    program = tmp_path / "hanging.py"
    program.write_text(
        "import os, pathlib, subprocess, sys, time\n"
        "notes = pathlib.Path(sys.argv[2])\n"
        "if 'rank' not in notes.read_text():\n"
        "    rank = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    notes.write_text(f'rank {rank.pid}\\n')\n"
        "    time.sleep(600)\n"
        f"os.execv(sys.executable, [sys.executable, '-S', {str(STUB)!r}, *sys.argv[1:]])\n"
    )
    with live_front(tmp_path, program, load_timeout_s=2.0) as front, front.http() as http:
        assert ask(http, "hello").status_code == 200
        (replica,) = front.front.replicas.values()
        assert replica.num_restarts == 1
        rank = Path("/proc") / front.notes.read_text().split()[1]
        # A process that nobody has waited for yet keeps its number and has no memory left.
        wait_until(lambda: not rank.exists() or " Z " in (rank / "stat").read_text())


def test_a_call_that_was_ended_for_memory_has_run_and_one_that_was_refused_has_not() -> None:
    memory = AnswerMemory(8)
    holding = memory.hold(100)
    ended: list[Exception] = []
    holding.on_ended = ended.append
    holding.num_bytes = 7
    memory.changed(holding, 7)
    with pytest.raises(AnswerMemoryFullError) as refused:
        memory.check()
    holding.num_bytes = 9
    memory.changed(holding, 2)
    assert has_run(Response(str(ended[0]), 503))
    assert not has_run(Response(str(refused.value), 503))

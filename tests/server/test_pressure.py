"""A server holds nothing afterwards, whatever clients, steps and signals do to it."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from hpu_duo.request import Request
from hpu_duo.server.http.listening import ConnectionLimits
from hpu_duo.server.running import AsyncEngine
from hpu_duo.server.running.admission import Admission
from tests.server.conftest import TinyChat
from tests.server.live import HOST, KEY, Live, live, wait_until

LONG = {"model": "tiny", "prompt": "Once", "max_tokens": 80, "temperature": 0, "ignore_eos": True}


def slowed(server: Live, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each step take a while, as on a large model."""
    runner = server.model.engine.runner
    launch = runner.launch

    def slowly(*arguments: Any) -> Any:
        time.sleep(seconds)
        return launch(*arguments)

    monkeypatch.setattr(runner, "launch", slowly)


def raw_post(
    server: Live, body: dict[str, Any], path: str = "/v1/completions", receive_bytes: int = 0
) -> socket.socket:
    """A call on a connection of its own, whose answer is not read.

    Args:
        receive_bytes: of an answer that this end holds before it is read; 0 = as the system has it.
    """
    data = json.dumps(body).encode()
    fields = ("Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}")
    head = "\r\n".join((f"POST {path} HTTP/1.1", *fields, "", ""))
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((HOST, server.port))
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("is_streamed", [True, False])
def test_what_a_client_held_is_free_within_a_step_when_it_goes(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    with live(tiny.load()) as server:
        slowed(server, 0.05, monkeypatch)
        connection = raw_post(server, {**LONG, "n": 3, "stream": is_streamed})
        wait_until(lambda: server.model.stats().num_running == 3)
        if is_streamed:
            connection.recv(100)
        began = server.model.stats().num_steps
        connection.close()
        wait_until(server.holds_nothing)
        # The step that ran, and at most one more that had been begun when the loop heard of it.
        assert server.model.stats().num_steps - began <= 2
        assert server.service.metrics.num_ended["abort"] == 3


def test_a_client_that_goes_before_its_first_token_frees_its_place_in_the_queue(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(tiny.load(max_num_seqs=1)) as server:
        slowed(server, 0.02, monkeypatch)
        first = raw_post(server, {**LONG, "stream": True})
        wait_until(lambda: server.model.stats().num_running == 1)
        second = raw_post(server, {**LONG, "stream": True})
        wait_until(lambda: server.model.stats().num_waiting == 1)
        second.close()
        wait_until(lambda: server.model.stats().num_waiting == 0)
        assert server.model.stats().num_running == 1
        first.close()


def test_a_full_queue_says_when_to_come_again(tiny: TinyChat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "_wait_for", lambda _, num_samples: 19 + num_samples)
    with live(tiny.load(max_num_seqs=2), max_queue=1) as server, ThreadPoolExecutor(3) as pool:
        slowed(server, 0.02, monkeypatch)
        client = server.client()
        running = [pool.submit(client.completions.create, **_plain(LONG)) for _ in range(3)]
        wait_until(lambda: server.service.engine.num_open == 3)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(**_plain(LONG))
        assert refused.value.response.headers["retry-after"] == "20"
        assert [len(one.result().choices) for one in running] == [1, 1, 1]
        assert client.completions.create(model="tiny", prompt="hi", max_tokens=1).choices


def test_one_call_that_is_larger_than_the_queue_is_served_alone(tiny: TinyChat) -> None:
    with live(tiny.load(max_num_seqs=2), max_queue=0) as server:
        done = server.client().completions.create(model="tiny", prompt="hi", n=7, max_tokens=3)
        assert len(done.choices) == 7


def test_a_reader_that_does_not_read_is_cut_and_the_others_are_served(tiny: TinyChat) -> None:
    # Answers of several megabytes, more than sockets buffer.
    with live(tiny.load(max_num_seqs=16), max_behind=200, max_choices=2048, max_logprobs=-1) as server:
        greedy = {"stream": True, "n": 1024, "logprobs": 90, "temperature": 1.0, "prompt": "Once"}
        stuck = raw_post(server, {**LONG, **greedy})
        wait_until(lambda: server.model.stats().num_running)
        done = server.client().completions.create(model="tiny", prompt="hi", max_tokens=5)
        assert done.usage is not None
        assert done.usage.completion_tokens == 5
        wait_until(server.holds_nothing)
        assert server.service.metrics.num_ended["error"] > 0
        stuck.close()


def test_a_failing_step_ends_the_call_that_caused_it(tiny: TinyChat, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(tiny.load()) as server, ThreadPoolExecutor(4) as pool:
        client = server.client()
        [expected] = client.completions.create(**_plain(LONG)).choices
        runner = server.model.engine.runner
        launch = runner.launch

        def failing(plan: Any, *args: Any) -> Any:
            if any(_is_bad(row.request) for row in plan.rows):
                raise RuntimeError("the device does not like it")
            return launch(plan, *args)

        monkeypatch.setattr(runner, "launch", failing)
        others = [pool.submit(client.completions.create, **_plain(LONG)) for _ in range(3)]
        with pytest.raises(openai.InternalServerError, match="does not like it"):
            client.completions.create(**_plain({**LONG, "prompt": "bad!"}))
        for one in others:
            assert one.result().choices == [expected]
        # Behind the first event of a stream the error is an event.
        with pytest.raises(openai.APIError, match="does not like it"):
            list(client.completions.create(**_plain({**LONG, "prompt": "bad!"}), stream=True))
        with server.http() as http:
            assert http.get("/health").status_code == 200


def _is_bad(request: Request) -> bool:
    return request.num_prompt_tokens == 4 and request.tokens[3] == 0  # "!" is token 0


def test_steps_that_all_fail_end_every_call_and_the_next_ones_are_served(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(tiny.load()) as server, ThreadPoolExecutor(4) as pool:
        client = server.client()
        runner = server.model.engine.runner
        with monkeypatch.context() as broken:
            broken.setattr(runner, "launch", _raise)
            calls = [pool.submit(client.completions.create, **_plain(LONG)) for _ in range(4)]
            for one in calls:
                with pytest.raises(openai.InternalServerError, match="gone"):
                    one.result()
        assert client.completions.create(**_plain(LONG)).choices


def _raise(*_: object) -> None:
    raise RuntimeError("the device is gone")


def test_an_engine_that_dies_ends_everything_and_the_server(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Live(tiny.load())

    def die(*_: object) -> None:
        raise SystemExit("out")

    monkeypatch.setattr(server.model.engine, "step", die)
    server.server.failure_visible_s = 1e9
    with pytest.raises((openai.APIStatusError, openai.APIConnectionError)):
        server.client().completions.create(**_plain(LONG))
    wait_until(lambda: server.server._failed_at is not None)
    # It still listens: a probe is told, and is not refused a connection.
    assert [httpx.get(f"{server.url}{path}").status_code for path in ("/health", "/live")] == [503, 503]
    server.server.failure_visible_s = 0.0
    assert server.join()
    assert server.server.ending.signal_number is None


def test_sigterm_lets_calls_end_and_takes_no_new_ones(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Live(tiny.load(), drain_seconds=100.0)
    slowed(server, 0.01, monkeypatch)
    with ThreadPoolExecutor(2) as pool, server.http() as http:
        client = server.client()
        running = pool.submit(lambda: list(client.completions.create(**_plain(LONG), stream=True)))
        wait_until(lambda: server.model.stats().num_running == 1)
        assert http.get("/ready").status_code == 200
        server.signal()
        wait_until(lambda: http.get("/ready").status_code == 503)
        assert http.get("/health").status_code == 200
        with pytest.raises(openai.InternalServerError, match="draining") as refused:
            client.completions.create(**_plain(LONG))
        assert refused.value.status_code == 503
        assert running.result()[-1].choices[0].finish_reason == "length"
    assert server.join()
    assert server.server.ending.is_drained
    assert server.holds_nothing()


def test_calls_that_do_not_end_in_time_end_with_an_error(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Live(tiny.load(), drain_seconds=0.2)
    slowed(server, 0.1, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        client = server.client()
        running = pool.submit(lambda: list(client.completions.create(**_plain(LONG), stream=True)))
        wait_until(lambda: server.model.stats().num_running == 1)
        server.signal()
        with pytest.raises(openai.APIError, match="draining"):
            running.result()
    assert server.join()
    assert not server.server.ending.is_drained
    assert server.holds_nothing()


def test_long_bodies_are_refused_whether_they_say_their_length_or_not(tiny: TinyChat) -> None:
    with live(tiny.load(), max_body_bytes=1000) as server, server.http() as http:
        headers = {"content-type": "application/json"}
        long = json.dumps({**LONG, "user": "x" * 1000}).encode()
        pieces = [long[:500], long[500:]]
        for content in (long, iter(pieces)):
            response = http.post("/v1/completions", content=content, headers=headers)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_long"
        short = {**LONG, "max_tokens": 1}
        assert http.post(
            "/v1/completions", content=iter([json.dumps(short).encode()]), headers=headers
        ).is_success


def test_pages_of_other_origins_may_call_only_when_they_are_named(tiny: TinyChat) -> None:
    asked = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    for origins, is_allowed in (
        ((), False),
        (("http://page.example",), True),
        (("http://other.example",), False),
    ):
        with live(tiny.load(), allowed_origins=origins, api_keys=(KEY,)) as server, server.http() as http:
            answer = http.options("/v1/completions", headers=asked)
            assert ("access-control-allow-origin" in answer.headers) is is_allowed


def _plain(body: dict[str, Any]) -> dict[str, Any]:
    """As the openai package takes it: what it does not know goes apart."""
    own = {"ignore_eos"}
    known = {name: value for name, value in body.items() if name not in own}
    return {**known, "extra_body": {name: body[name] for name in own if name in body}}


def recompilations(http: Any) -> str:
    """The metric as the server tells it."""
    found = {line.split("{")[0]: line for line in http.get("/metrics").text.splitlines()}
    return found["hpuduo:recompilations_total"].split()[-1]


def test_calls_are_taken_once_every_shape_is_captured(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, may_capture = tiny.load(graphs="replay", attention="sdpa"), threading.Event()
    warmup = model.warmup

    def late(progress: Any) -> None:
        may_capture.wait()
        warmup(progress)

    monkeypatch.setattr(model, "warmup", late)
    server = Live(model, warm_up=True)
    with server.http() as http:
        probes = ("/live", "/health", "/ready")
        assert [http.get(path).status_code for path in probes] == [200, 503, 503]
        refused = http.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert http.get("/metrics").status_code == http.get("/v1/models").status_code == 200
        before = recompilations(http)
        may_capture.set()
        wait_until(lambda: http.get("/health").status_code == 200)
        assert [http.get(path).status_code for path in probes] == [200, 200, 200]
        assert http.post("/v1/completions", json=LONG).json()["usage"]["completion_tokens"] == 80
        done, total = server.service.warm_up_progress or (0, 1)
        assert done == total
        # The compiler counts for the whole process, other engines of it included.
        assert recompilations(http) == before
    server.signal()
    assert server.join()


def test_a_warm_up_that_fails_ends_the_server(tiny: TinyChat, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.load(graphs="replay", attention="sdpa")

    def fail(_: Any) -> None:
        raise ValueError("no memory")

    monkeypatch.setattr(model, "warmup", fail)
    server = Live(model, warm_up=True)
    assert server.join()
    assert server.server.ending.signal_number is None


def test_a_connection_that_asks_for_nothing_is_no_call(server: Live) -> None:
    before = dict(server.service.metrics.num_responses)
    connections = [socket.create_connection((HOST, server.port)) for _ in range(50)]
    assert httpx.get(f"{server.url}/health").status_code == 200
    for connection in connections:
        connection.close()
    assert sum(server.service.metrics.num_responses.values()) == sum(before.values()) + 1


@pytest.mark.parametrize(("quiet_s", "has_comment"), [(15, False), (0, True)])
def test_a_stream_has_comments_only_where_it_has_been_silent(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch, quiet_s: float, has_comment: bool
) -> None:
    # vLLM's load generator does not read a stream behind a comment, so those without need of one have none.
    monkeypatch.setattr(AsyncEngine.__init__, "__defaults__", (8192, 2**28, 0.01, 4096))
    with live(tiny.load(), quiet_s=quiet_s) as server, server.http() as http:
        slowed(server, 0.1, monkeypatch)
        text = http.post("/v1/completions", json={**LONG, "max_tokens": 5, "stream": True}).text
    assert ("\n\n: keep-alive\n\n" in f"\n\n{text}") is has_comment
    assert text.count('"text"') == 5


def test_a_waiting_connection_outlives_those_of_clients() -> None:
    # With uvicorn's 5 seconds, as many as httpx has, calls are lost on connections that are being closed.
    assert ConnectionLimits().head_s > 60

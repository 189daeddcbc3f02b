"""One request: whole answers, and every way in which an answer can fail."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from hpu_duo.lab.load import Endpoint, Failure, Outcome, PlannedRequest
from hpu_duo.lab.load.client import Client, ServerError
from tests.load.stub_server import DONE, Answer, StubServer, delta, event, token, usage

Serve = Callable[[Callable[[dict], Answer]], StubServer]
REQUEST = PlannedRequest(0.0, b'{"stream": true}', 5, 3)


def send(
    address: str,
    endpoint: Endpoint = Endpoint.COMPLETIONS,
    *,
    timeout_s: float | None = None,
    headers: dict[str, str] | None = None,
) -> Outcome:
    """Send one request; the clock goes on by 1 whenever it is looked at."""
    ticks = iter(range(1, 1000))

    async def run() -> Outcome:
        outcome = Outcome(0.0, REQUEST.num_prompt_tokens)
        async with Client(address, timeout_s=timeout_s, headers=headers) as client:
            await client.send(endpoint, REQUEST, outcome, lambda: float(next(ticks)))
        return outcome

    return asyncio.run(run())


def test_a_whole_answer_has_text_times_and_the_servers_counts(serve: Serve) -> None:
    parts = [token("a"), token("b"), token("", "length"), usage(11, 2), DONE]
    outcome = send(serve(lambda _: Answer(parts)).address)
    assert outcome.is_whole
    assert (outcome.text, outcome.num_prompt_tokens, outcome.num_output_tokens) == ("ab", 11, 2)
    assert outcome.is_counted_by_server
    assert outcome.status == 200
    assert len(outcome.token_times_s) == 2
    times = [outcome.sent_s, *outcome.token_times_s, outcome.end_s]
    assert times == sorted(times)


def test_without_counts_events_are_taken_for_tokens(serve: Serve) -> None:
    outcome = send(serve(lambda _: Answer([token("a"), token("b"), token("c", "stop"), DONE])).address)
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens) == (5, 3)
    assert not outcome.is_counted_by_server


def test_the_role_of_a_chat_is_no_token(serve: Serve) -> None:
    parts = [delta(role="assistant", content=""), delta(content="Hi"), delta("stop"), DONE]
    outcome = send(serve(lambda _: Answer(parts)).address, Endpoint.CHAT)
    assert outcome.is_whole
    assert len(outcome.token_times_s) == outcome.num_output_tokens == 1


def test_a_finish_reason_is_an_end_without_done(serve: Serve) -> None:
    assert send(serve(lambda _: Answer([token("a", "stop")])).address).is_whole


@pytest.mark.parametrize(
    ("answer", "failure", "kind", "error"),
    [
        (
            Answer([b'{"error": {"message": "queue is full"}}'], 429, "application/json"),
            Failure.STATUS,
            "status 429",
            "queue is full",
        ),
        (Answer([b"<h1>no</h1>"], 502, "text/html"), Failure.STATUS, "status 502", "<h1>no</h1>"),
        (
            Answer([b"{}"], 200, "application/json"),
            Failure.STREAM,
            "stream",
            "expected an event stream, got application/json",
        ),
        (
            Answer([token("a"), token("b")]),
            Failure.STREAM,
            "stream",
            "the stream ends after 2 tokens without a finish reason or [DONE]",
        ),
        (Answer([DONE]), Failure.STREAM, "stream", "the stream ends without a token"),
        (
            Answer([token("a"), event({"error": {"message": "the step failed"}}), DONE]),
            Failure.STREAM,
            "stream",
            "the step failed",
        ),
        (Answer([b"data: {\n\n"]), Failure.STREAM, "stream", "expected JSON in an event, got '{'"),
    ],
)
def test_an_answer_that_fails_is_told_from_a_whole_one(
    serve: Serve, answer: Answer, failure: Failure, kind: str, error: str
) -> None:
    outcome = send(serve(lambda _: answer).address)
    assert (outcome.failure, outcome.kind, outcome.error) == (failure, kind, error)
    assert outcome.end_s > outcome.sent_s


def test_what_came_before_a_failure_is_kept(serve: Serve) -> None:
    outcome = send(serve(lambda _: Answer([token("half "), token("of it")], is_cut=True)).address)
    assert outcome.failure is Failure.STREAM
    assert outcome.text == "half of it"
    assert outcome.num_output_tokens == 2


def test_a_closed_port_is_a_failed_connection() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        outcome = send(f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert outcome.failure is Failure.CONNECTION
    assert outcome.error


def test_an_answer_that_does_not_end_times_out(serve: Serve) -> None:
    never = Answer([token("a"), asyncio.Event()])
    outcome = send(serve(lambda _: never).address, timeout_s=0.3)
    assert outcome.failure is Failure.TIMEOUT
    assert outcome.error == "no end within 0.3 s"
    assert outcome.text == "a"


def test_headers_and_body_are_sent_as_they_are(serve: Serve) -> None:
    server = serve(lambda _: Answer([token("a", "stop")]))
    send(server.address + "/v1/", headers={"Authorization": "Bearer k"})
    assert server.bodies == [{"stream": True}]
    assert server.heads[0].startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer k\r\n" in server.heads[0]


def models(client: Client, wait_s: float = 0.0) -> list[str]:
    async def ask() -> list[str]:
        async with client:
            return await client.models(wait_s)

    return asyncio.run(ask())


def test_models_are_asked_for(serve: Serve) -> None:
    server = serve(lambda _: Answer())
    assert models(Client(server.address)) == ["stub", "other"]


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"cannot ask http://127.0.0.1:{port}/v1/models"):
            models(Client(f"http://127.0.0.1:{port}"))


def test_a_server_that_refuses_is_not_waited_for(serve: Serve) -> None:
    server = serve(lambda _: Answer())
    server.models_status = 401
    with pytest.raises(ServerError, match="status 401"):
        models(Client(server.address), wait_s=600)


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://x", "http://", "http://x/?a=b", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="expected an address such as"):
        Client(address)

"""``hpu-duo bench serve``: against a server that answers as the test says."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from typer.testing import Result

from tests.load.stub_server import DONE, Answer, StubServer, delta, token, usage

Run = Callable[..., Result]
TRACES = Path(__file__).parent.parent / "data" / "traces"


def answer(body: dict) -> Answer:
    """As many tokens as were asked for, each in an event of its own, and their count."""
    if "messages" in body:
        words = body["messages"][0]["content"].split()
        parts = [delta(role="assistant"), delta(content="a"), delta("stop"), usage(len(words), 1)]
        return Answer([*parts, DONE])
    num = body["max_tokens"]
    return Answer([*[token("a")] * (num - 1), token("a", "length"), usage(len(body["prompt"]), num), DONE])


@pytest.fixture
def server() -> Iterator[StubServer]:
    server = StubServer(answer)
    yield server
    server.close()


@pytest.mark.slow
def test_a_run_is_reported_and_written(hpu_duo: Run, server: StubServer, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    result = hpu_duo(
        *("bench", "serve", "--base-url", server.address, "--num-prompts", 12, "--request-rate", 200),
        *("--input-len", 20, "--output-len", 4, "--range-ratio", 0.5, "--num-warmups", 2),
        *("--goodput", "ttft:60000", "e2el:60000", "--percentiles", 50, 99, "--metadata", "machine=here"),
        *("--out", out, "--details"),
    )
    assert result.exit_code == 0, result.stderr
    assert "requests completed" in result.stdout
    assert "time to first token" in result.stdout
    fields = json.loads(out.read_text())
    measured = server.bodies[2:]
    assert len(measured) == 12
    assert fields["completed"] == 12
    assert fields["failed"] == 0
    assert fields["model_id"] == "stub"
    assert fields["request_rate"] == 200
    assert fields["metadata"] == {"machine": "here"}
    assert fields["total_input_tokens"] == sum(len(body["prompt"]) for body in measured)
    assert fields["total_output_tokens"] == sum(body["max_tokens"] for body in measured)
    # Connections of their own may bring requests in another order.
    assert sorted(fields["input_lens"]) == sorted(len(body["prompt"]) for body in measured)
    assert fields["request_goodput"] == fields["request_throughput"]
    assert fields["p50_ttft_ms"] == pytest.approx(fields["median_ttft_ms"])
    assert all(10 <= len(body["prompt"]) <= 30 and 2 <= body["max_tokens"] <= 6 for body in measured)


@pytest.mark.slow
def test_the_result_is_json_that_every_parser_reads(hpu_duo: Run, server: StubServer) -> None:
    result = hpu_duo(
        *("bench", "serve", "--base-url", server.address, "--num-prompts", 3, "--json"),
        *("--api-key", "secret", "--header", "X-Client=me", "--ignore-eos", "--extra-body", '{"top_k": 4}'),
    )
    assert result.exit_code == 0, result.stderr

    def refuse(name: str) -> None:
        raise AssertionError(name)

    fields = json.loads(result.stdout, parse_constant=refuse)
    assert fields["request_rate"] == "inf"
    assert fields["extra_body"] == {"temperature": 0.0, "ignore_eos": True, "top_k": 4}
    assert server.bodies[0]["top_k"] == 4
    assert "Authorization: Bearer secret" in server.heads[0]
    assert "X-Client: me" in server.heads[0]
    assert "secret" not in result.stdout


def test_a_trace_is_sent_at_its_times(hpu_duo: Run, server: StubServer) -> None:
    result = hpu_duo(
        *("bench", "serve", "--base-url", server.address, "--trace", TRACES / "mooncake.jsonl"),
        *("--speed", 20, "--length-scale", 0.1, "--num-warmups", 0, "--max-total-tokens", 130, "--json"),
        "--details",
    )
    assert result.exit_code == 0, result.stderr
    fields = json.loads(result.stdout)
    # The second request, of 140 + 3 tokens, is too long.
    sent = {len(body["prompt"]): body for body in server.bodies}
    assert {num: body["max_tokens"] for num, body in sent.items()} == {110: 5, 60: 1, 30: 70}
    assert sent[110]["prompt"][:51] == sent[60]["prompt"][:51]
    assert fields["request_rate"] is None
    assert fields["start_times"][1] >= 0.125
    assert fields["start_times"][2] >= 0.2
    assert fields["trace"] == "mooncake.jsonl"


def test_a_trace_at_a_rate_of_its_own_keeps_its_lengths(hpu_duo: Run, server: StubServer) -> None:
    result = hpu_duo(
        *("bench", "serve", "--base-url", server.address, "--trace", TRACES / "burstgpt.csv"),
        *("--request-rate", "inf", "--num-warmups", 0, "--num-prompts", 2),
    )
    assert result.exit_code == 0, result.stderr
    assert sorted(len(body["prompt"]) for body in server.bodies) == [311, 902]


def test_conversations_are_sent_as_chats(hpu_duo: Run, server: StubServer, model_dir: Path) -> None:
    result = hpu_duo(
        *("bench", "serve", "--base-url", server.address, "--trace", TRACES / "sharegpt.json"),
        *("--tokenizer", model_dir, "--endpoint", "/v1/chat/completions", "--num-warmups", 0, "--json"),
    )
    assert result.exit_code == 0, result.stderr
    texts = {body["messages"][0]["content"] for body in server.bodies}
    assert texts == {
        "Name three rivers that flow into the North Sea.",
        "Write a line about the sea and a lighthouse at night.",
    }
    # The tokenizer has a token for each character.
    answers = {body["max_completion_tokens"] for body in server.bodies}
    assert answers == {
        len("The Rhine, the Elbe and the Thames flow into the North Sea."),
        len("The lamp turns, and the dark water answers with one bright road after another."),
    }


def test_random_texts_have_as_many_tokens_as_asked_for(
    hpu_duo: Run, server: StubServer, model_dir: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    result = hpu_duo(
        *("bench", "serve", "--base-url", server.address, "--endpoint", "/v1/chat/completions"),
        *("--tokenizer", model_dir, "--num-prompts", 4, "--input-len", 33, "--num-warmups", 0),
    )
    assert result.exit_code == 0, result.stderr
    for body in server.bodies:
        ids = tokenizer(body["messages"][0]["content"], add_special_tokens=False)["input_ids"]
        assert len(ids) == 33


@pytest.mark.slow
def test_failures_are_counted_by_kind_and_quoted(hpu_duo: Run) -> None:
    full = Answer([b'{"error": {"message": "the queue is full"}}'], 429, "application/json")
    server = StubServer(lambda body: full if len(server.bodies) > 3 else answer(body))
    try:
        result = hpu_duo(*("bench", "serve", "--base-url", server.address, "--num-prompts", 5, "--json"))
        assert result.exit_code == 0, result.stderr
        fields = json.loads(result.stdout)
        assert (fields["completed"], fields["failures"]) == (2, {"status 429": 3})
        assert "note: 3 failed: status 429" in result.stderr
        assert "note: the queue is full (3 times)" in result.stderr
    finally:
        server.close()


def test_a_run_without_an_answer_has_an_exit_code_of_its_own(hpu_duo: Run) -> None:
    server = StubServer(lambda _: Answer([b"no"], 500, "text/plain"))
    try:
        result = hpu_duo(
            "bench", "serve", "--base-url", server.address, "--num-prompts", 2, "--num-warmups", 0
        )
        assert result.exit_code == 1
        assert "2 failed: status 500" in result.stderr
    finally:
        server.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--endpoint", "/v1/embeddings"], "expected an endpoint /v1/completions or /v1/chat/completions"),
        (["--endpoint", "/v1/chat/completions"], "expected a tokenizer"),
        (["--goodput", "itl:5"], "expected goals such as ttft:500"),
        (["--percentiles", "101"], "expected --percentiles from 0 to 100"),
        (["--request-rate", "0"], "expected per_s above 0"),
        (["--num-prompts", "0"], "expected --num-prompts of at least 1"),
        (["--max-concurrency", "0"], "expected max_concurrency of at least 1"),
        (["--token-ids", "5:5"], "expected --token-ids such as 300:1000"),
        (["--trace", "missing.csv"], "cannot read the trace missing.csv"),
        (["--trace", "missing.csv", "--trace-format", "csv"], "expected a trace format among"),
        (["--trace", str(TRACES / "sharegpt.json")], "expected a tokenizer"),
        (["--max-total-tokens", "5"], "expected a request of at most 5 tokens, got none"),
        (["--tokenizer", str(TRACES)], "cannot read the tokenizer"),
        (["--extra-body", "[]"], "expected a JSON object in --extra-body"),
        (["--header", "X"], "expected --header NAME=VALUE, got 'X'"),
        (["--header", "X=a\nY: b"], "without control characters"),
        (["--metadata", "x"], "expected --metadata NAME=VALUE"),
        (["--base-url", "localhost"], "expected an address such as"),
        (["--out", "no/such/place.json"], "expected --out to be a file"),
        (["--model", "third"], "expected a model among stub, other, got 'third'"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    hpu_duo: Run, server: StubServer, arguments: list[str], message: str
) -> None:
    result = hpu_duo("bench", "serve", "--base-url", server.address, "--num-prompts", 2, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not server.bodies

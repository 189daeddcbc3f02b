"""Lines of logs without prompts, answers, keys and tokens, whatever stands around them."""

import json
import subprocess
import sys

import pytest

from tests.examples.gaudi.gaudi_server import GAUDI

CALL = {"id": "cmpl-1", "prompt_tokens": 12, "prompts": ["my secret question"]}


def redacted(*lines: bytes | str) -> list[str]:
    given = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
    command = [sys.executable, str(GAUDI / "operate" / "redact.py")]
    done = subprocess.run(command, input=given, capture_output=True, env={"LC_ALL": "C"}, check=True)
    return done.stdout.decode().splitlines()


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "server-1  | ",
        "Nov 22 17:00:01 host hpu-duo[4711]: ",
        "[2026-11-22 17:00:01] {main} [INFO] ",
        "{broken [",
        "served {} and ",
    ],
)
def test_json_behind_a_prefix_loses_its_texts_and_keeps_its_numbers(prefix: str) -> None:
    (line,) = redacted(prefix + json.dumps(CALL) + " behind")
    assert line == f"{prefix}{json.dumps({**CALL, 'prompts': '***'})} behind"


@pytest.mark.parametrize(
    "node",
    [
        [CALL, {"content": "my secret answer"}],
        {"log": json.dumps(CALL) + "\n", "stream": "stderr"},
        {"tool_calls": [{"function": {"name": "find", "arguments": "my secret"}}]},
        {"reasoning": "my secret"},
        {"reasoning_content": "my secret"},
        {"query": "my secret", "documents": ["my secret"]},
        {"Prompt": "my secret"},
        {"headers": {"Authorization": "Basic my secret", "X-Api-Key": "my secret"}},
        {"logprobs": {"content": [{"token": "my secret"}]}},
    ],
    ids=str,
)
def test_texts_are_found_in_lists_and_in_strings_of_json(node: object) -> None:
    (line,) = redacted(f"server-1 | {json.dumps(node)}")
    assert "my secret" not in line
    assert isinstance(json.loads(line.removeprefix("server-1 | ")), type(node))


@pytest.mark.parametrize(
    "line",
    [
        json.dumps(CALL)[:-3],
        f"{json.dumps(CALL)[:-3]}, {json.dumps({'text': 'my secret'})}",
        "received {'prompt': 'my secret question'}",
        "received prompt: ['my secret question'], n=1",
        json.dumps(json.dumps(CALL)),
        '{"a": ' * 100_000 + '{"prompt": "my secret"}',
    ],
    ids=range(6),
)
def test_what_is_no_whole_json_is_cut_at_its_first_text(line: str) -> None:
    (shown,) = redacted(line)
    assert "secret" not in shown


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Authorization: Basic bGV0LW1lLWlu", "Authorization: Basic ***"),
        ("authorization: let-me-in", "authorization: ***"),
        ("X-Api-Key: let-me-in", "X-Api-Key: ***"),
        ("Cookie: a=let-me; b=in", "Cookie: ***"),
        ("GET http://user:let-me-in@host:8000/v1", "GET http://***@host:8000/v1"),
        ("proxy user:let-me-in@host", "proxy ***@host"),
        ("serve --api-key 'let me in' --port 8000", "serve --api-key *** --port 8000"),
        (r"serve --api-key let\ me\ in --port 8000", "serve --api-key *** --port 8000"),
        ('run HF_TOKEN="let me \\" in" serve', "run HF_TOKEN=*** serve"),
        ("HPU_DUO_API_KEY=let me in", "HPU_DUO_API_KEY=***"),
        ("hf_abcdefgh1234 sk-abcdefgh1234", "hf_*** sk-***"),
    ],
)
def test_secrets_are_taken_out_whole(line: str, shown: str) -> None:
    assert redacted(line) == [shown]


@pytest.mark.parametrize(
    "line",
    [
        "hpu-duo: serving m at http://0.0.0.0:8000, warming up",
        "launch: hpu-duo serve --max-num-batched-tokens 64 --api-key-file /etc/key --port 8000",
        "MAX_NUM_BATCHED_TOKENS=64",
        '{"prompt_tokens": 12, "tokens": 3, "seconds": [0.1, 2.0]}',
        "24 graphs [1, 2] captured in 3.1 s {fast}",
    ],
)
def test_other_lines_stay_as_they_are(line: str) -> None:
    assert redacted(line) == [line]


def test_bytes_that_are_no_text_do_not_end_the_log() -> None:
    assert redacted(b"before \xff", "behind") == ["before \ufffd", "behind"]

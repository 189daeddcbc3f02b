"""Long texts: those that cannot fit are not encoded, and no others wait for callers who are gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from hpu_duo.server import prompts as encoding
from hpu_duo.server.prompts import PromptEncoder
from tests.engine.tiny import MAX_LEN
from tests.server.conftest import TinyChat
from tests.server.live import Live, live, wait_until
from tests.server.test_pressure import raw_post

CHAT = "/v1/chat/completions"
LONG = "the cat sat " * 50_000


def chat_of(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **fields}


class Encoded:
    """Texts that a server has encoded; it may be kept from going on.

    Attributes:
        texts: so far.
        may_go_on: is set, unless a test clears it.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self.texts: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._tokenizer = encoder.tokenizer

    def __call__(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        assert self.may_go_on.wait(30)
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def encoder_of(server: Live) -> PromptEncoder:
    encoder = server.service.served.encoder
    assert encoder is not None
    return encoder


@pytest.fixture
def encoded(server: Live, monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoded]:
    watched = Encoded(encoder_of(server))
    monkeypatch.setattr(encoder_of(server), "tokenizer", watched)
    yield watched
    watched.may_go_on.set()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG, "max_tokens": 1}, "prompt"),
        ("/v1/completions", {"prompt": ["hi", LONG], "max_tokens": 1}, "prompt"),
        (CHAT, chat_of(LONG), "messages"),
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    server: Live, encoded: Encoded, path: str, body: dict[str, Any], param: str
) -> None:
    with server.http() as http:
        refused = http.post(path, json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert f"maximum context length is {MAX_LEN} tokens" in error["message"]
    assert all(len(text) < len(LONG) for text in encoded.texts)


def test_a_text_that_is_cut_to_its_last_tokens_is_not_encoded_whole(server: Live, encoded: Encoded) -> None:
    asked = {"prompt": LONG + "Once upon", "truncate_prompt_tokens": 6, "max_tokens": 1, "echo": True}
    with server.http() as http:
        answer = http.post("/v1/completions", json=asked).json()
        http.post(CHAT, json=chat_of(LONG, truncate_prompt_tokens=6)).raise_for_status()
    assert answer["choices"][0]["text"].startswith("e upon")
    assert [MAX_LEN <= len(text) <= 8 * MAX_LEN for text in encoded.texts] == [True, True]


def test_calls_that_are_encoded_have_places_in_the_queue(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(tiny.load(max_num_seqs=1), max_queue=1) as server, ThreadPoolExecutor(2) as pool:
        encoder_of(server).num_at_once = 0
        watched = Encoded(encoder_of(server))
        monkeypatch.setattr(encoder_of(server), "tokenizer", watched)
        watched.may_go_on.clear()
        with server.http() as http:
            waiting = [pool.submit(http.post, CHAT, json=chat_of("hi")) for _ in range(2)]
            try:
                wait_until(lambda: len(watched.texts) == 2)
                assert http.post(CHAT, json=chat_of("hi")).status_code == 429
                assert http.post("/v1/completions", json={"prompt": "hi"}).status_code == 429
            finally:
                watched.may_go_on.set()
            assert [one.result().status_code for one in waiting] == [200, 200]
            assert http.post(CHAT, json=chat_of("hi")).status_code == 200
        assert server.service.admission.num_held == 0


def test_texts_of_callers_who_are_gone_are_not_encoded(
    server: Live, encoded: Encoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_of(server), "num_at_once", 0)
    encoded.may_go_on.clear()
    admission = server.service.admission
    # As many as there are threads, and one more, which waits for them.
    busy = [raw_post(server, chat_of("busy"), CHAT) for _ in range(encoding._NUM_THREADS)]
    wait_until(lambda: len(encoded.texts) == encoding._NUM_THREADS)
    last = raw_post(server, chat_of("last"), CHAT)
    wait_until(lambda: admission.num_held == encoding._NUM_THREADS + 1)
    for connection in [*busy, last]:
        connection.close()
    wait_until(lambda: admission.num_held == 0)
    encoded.may_go_on.set()
    assert httpx.post(f"{server.url}{CHAT}", json=chat_of("next"), timeout=30).status_code == 200
    assert not any("last" in text for text in encoded.texts)


def test_a_short_chat_does_not_wait_for_long_texts(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, may_go_on = encoder_of(server), threading.Event()
    blocked = [encoder._threads.submit(may_go_on.wait, 30) for _ in range(encoding._NUM_THREADS)]
    try:
        assert httpx.post(f"{server.url}{CHAT}", json=chat_of("hi"), timeout=10).status_code == 200
        assert not any(one.done() for one in blocked)
    finally:
        may_go_on.set()

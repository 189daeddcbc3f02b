"""Answers take no more memory than they may, and what they take is counted."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from hpu_duo.server.config import ServerConfig
from hpu_duo.server.running import AnswerMemory, Holding
from tests.server.conftest import TinyChat
from tests.server.live import Live, live, wait_until
from tests.server.test_metrics import samples
from tests.server.test_pressure import LONG, raw_post, slowed

MESSAGES = [{"role": "user", "content": "hi"}]


def test_more_logprobs_than_the_server_gives_are_refused(server: Live) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError, match=r"logprobs: expected at most 20 .*got 21") as refused:
        client.completions.create(model="tiny", prompt="hi", logprobs=21)
    assert refused.value.param == "logprobs"
    chat: Any = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "max_tokens": 1}
    with pytest.raises(openai.BadRequestError, match="top_logprobs: expected at most 20") as refused:
        client.chat.completions.create(**chat, top_logprobs=21)
    assert refused.value.param == "top_logprobs"
    done = client.chat.completions.create(**chat, top_logprobs=20)
    told = done.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert len(told.content[0].top_logprobs) == 20


def test_a_whole_answer_that_grows_too_large_ends_with_an_error_and_a_stream_goes_on(tiny: TinyChat) -> None:
    with live(tiny.load(), max_answer_bytes=50_000) as server:
        asked: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 40, "temperature": 0}
        create: Any = server.client().completions.create
        assert create(**asked).choices
        with pytest.raises(openai.BadRequestError, match="at most 50,000 bytes") as refused:
            create(**asked, logprobs=9, extra_body={"ignore_eos": True})
        assert refused.value.code == "answer_too_large"
        parts = list(create(**asked, logprobs=9, stream=True, extra_body={"ignore_eos": True}))
        assert parts[-1].choices[0].finish_reason == "length"
        # Prompts that stand before their answers count once for each answer, as do their logprobs.
        for echoed in ({"n": 200}, {"logprobs": 9}, {"logprobs": 0, "n": 10}):
            with pytest.raises(openai.BadRequestError, match="at most 50,000 bytes"):
                create(**{**asked, "prompt": "Once upon a time " * 4, "max_tokens": 0}, echo=True, **echoed)


def test_what_chats_echo_and_prompts_that_come_back_are_counted(tiny: TinyChat) -> None:
    with live(tiny.load(), max_answer_bytes=50_000) as server:
        client: Any = server.client()
        cut = {"truncate_prompt_tokens": 9}
        long = [*MESSAGES, {"role": "assistant", "content": "x" * 3000}]
        with pytest.raises(openai.BadRequestError, match="at most 50,000 bytes"):
            client.chat.completions.create(
                model="tiny", messages=long, n=16, max_tokens=1, extra_body={"echo": True, **cut}
            )
        with pytest.raises(openai.BadRequestError, match="at most 50,000 bytes"):
            client.completions.create(
                model="tiny", prompt=[5] * 60, n=200, max_tokens=1, extra_body={"return_token_ids": True}
            )


def test_what_waits_to_be_sent_is_counted(tiny: TinyChat, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(tiny.load()) as server:
        slowed(server, 0.02, monkeypatch)
        assert samples(server)["hpuduo:answer_bytes"] == 0
        connection = raw_post(server, {**LONG, "logprobs": 20})
        wait_until(lambda: samples(server)["hpuduo:answer_bytes"] > 10_000)
        connection.close()
        wait_until(lambda: samples(server)["hpuduo:answer_bytes"] == 0)


def test_answers_of_all_calls_together_take_no_more_than_they_may(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def watched(self: AnswerMemory, holding: Holding, num_bytes: int) -> None:
        changed(self, holding, num_bytes)
        taken.append(self.num_bytes)

    changed = AnswerMemory.changed
    monkeypatch.setattr(AnswerMemory, "changed", watched)
    with live(tiny.load(), max_answer_bytes=400_000, answer_memory_bytes=500_000) as server:
        slowed(server, 0.005, monkeypatch)
        create: Any = server.client().completions.create
        asked: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 40, "temperature": 0}
        asked |= {"logprobs": 9, "extra_body": {"ignore_eos": True}}

        def ask(_: int) -> str:
            try:
                return str(create(**asked).choices[0].finish_reason)
            except openai.InternalServerError as error:
                return f"{error.status_code}, {error.response.headers['Retry-After']}: {error.message}"

        with ThreadPoolExecutor(16) as threads:
            ends = list(threads.map(ask, range(16)))
        assert "length" in ends
        [refused] = set(ends) - {"length"}
        assert refused.startswith("503, 1: ")
        assert "answers of all calls together of at most 500,000 bytes" in refused
        assert 300_000 < max(taken) <= 500_000
        assert server.service.engine.memory.num_bytes == 0
        assert ask(0) == "length"


def test_a_caller_who_takes_nothing_of_an_answer_makes_room_for_others(tiny: TinyChat) -> None:
    most = 40_000_000
    with live(tiny.load(), max_answer_bytes=most, answer_memory_bytes=most) as server:
        memory = server.service.engine.memory
        talk = [*MESSAGES, {"role": "assistant", "content": "x" * 100_000}]
        asked: Any = {"model": "tiny", "messages": talk, "n": 64, "max_tokens": 1}
        more = {"echo": True, "truncate_prompt_tokens": 9}
        late = raw_post(server, {**asked, **more}, "/v1/chat/completions")
        late.settimeout(30)
        assert late.recv(10)
        wait_until(server.holds_nothing)
        with server.http() as http:
            told = http.get("/stats").json()
        assert told["answer_bytes"] == memory.num_bytes > 25_000_000
        assert told["max_answer_memory_bytes"] == most
        done = server.client().chat.completions.create(**asked, extra_body=more)
        assert len(done.choices) == 64
        assert len(_rest(late)) < 6_400_000
        wait_until(lambda: not memory.num_bytes)
        memory.num_bytes = most
        with pytest.raises(openai.InternalServerError, match="all calls together"):
            server.client().completions.create(model="tiny", prompt="hi")
        memory.num_bytes = 0


def test_one_call_may_not_take_more_than_all_together() -> None:
    with pytest.raises(
        ValueError, match=r"expected answer_memory_bytes .* of at least max_answer_bytes .*, 9"
    ):
        ServerConfig(("tiny",), max_answer_bytes=9, answer_memory_bytes=8)


def _rest(connection: socket.socket) -> bytes:
    found = bytearray()
    while piece := connection.recv(1 << 16):
        found += piece
    return bytes(found)

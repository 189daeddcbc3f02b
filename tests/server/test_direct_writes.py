"""Pieces of bodies that are written by plain calls, and what happens when a connection takes none."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hpu_duo.engine.outputs import RequestOutput
from hpu_duo.sampling import SamplingParams
from hpu_duo.server.http.middleware import DirectWrites
from hpu_duo.server.responding import WRITE, EventSender
from hpu_duo.server.running import AnswerMemory, ChoiceOutput, OutputStream, Submission
from hpu_duo.server.running.admission import Timing
from tests.server.conftest import TinyChat
from tests.server.live import live
from tests.server.test_pressure import LONG, raw_post, wait_until


def opened() -> OutputStream:
    params = SamplingParams(max_tokens=12)
    holding = AnswerMemory(10_000).hold(10_000)
    return OutputStream([Submission("x", [1], params)], 10, holding, lambda _: None, Timing())


def push(stream: OutputStream, token: int) -> None:
    stream.push(RequestOutput("x", 0, (token,)), 0.0)
    stream.wake()


def test_a_read_that_waits_hands_on_what_comes_until_it_is_not_taken() -> None:
    async def work() -> None:
        stream, taken = opened(), []

        def take(batch: list[ChoiceOutput]) -> bool:
            taken.extend(one.output.token_ids[0] for one in batch)
            return taken[-1] < 3

        reading = asyncio.create_task(stream.read(take))
        await asyncio.sleep(0)
        for token in (1, 2, 3, 4):
            push(stream, token)
        assert taken == [1, 2, 3]
        batch = await reading
        assert batch is not None
        assert [one.output.token_ids for one in batch] == [(4,)]

    asyncio.run(work())


def test_an_error_of_who_takes_fails_the_stream_and_no_other() -> None:
    def take(_: list[ChoiceOutput]) -> bool:
        raise ZeroDivisionError("in the middle")

    async def work() -> None:
        stream = opened()
        reading = asyncio.create_task(stream.read(take))
        await asyncio.sleep(0)
        push(stream, 1)
        with pytest.raises(ZeroDivisionError, match="in the middle"):
            await reading

    asyncio.run(work())


def test_a_paused_connection_gets_nothing_of_a_piece_that_it_refuses() -> None:
    async def work() -> None:
        writable, written = asyncio.Event(), []

        async def send(message: Any) -> None:
            await writable.wait()
            written.append(message["body"])

        async def app(scope: Any, receive: Any, send: Any) -> None:
            write = scope["extensions"][WRITE]
            assert not write(b"refused")
            writable.set()
            assert write(b"taken")
            await asyncio.sleep(0)

        async def receive() -> Any:
            raise AssertionError("nothing is received")

        await DirectWrites(app)({"type": "http"}, receive, send)
        assert written == [b"taken"]

    asyncio.run(work())


def test_a_reader_that_comes_late_gets_every_event_once_and_in_order(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several megabytes: the connection is paused, and goes on when the reader does.
    refused: list[bool] = []

    take = EventSender.take

    def noted(self: EventSender, batch: list[ChoiceOutput]) -> bool:
        is_taken = take(self, batch)
        if not is_taken:
            refused.append(True)
        return is_taken

    monkeypatch.setattr(EventSender, "take", noted)
    body = {**LONG, "stream": True, "n": 30, "logprobs": 90, "return_token_ids": True, "seed": 1}
    with live(tiny.load(max_num_seqs=16), max_behind=1 << 20, max_choices=30, max_logprobs=90) as server:
        with server.http() as http:
            calm = http.post("/v1/completions", json=body).text
        refused.clear()
        connection = raw_post(server, body, receive_bytes=1 << 16)
        wait_until(lambda: refused)
        answer = bytearray()
        while not answer.endswith(b"0\r\n\r\n"):
            answer += connection.recv(1 << 16)
        connection.close()
    late = b"".join(line for line in answer.split(b"\r\n") if line.startswith(b"data: "))
    assert tokens(late.decode()) == tokens(calm)


def tokens(text: str) -> dict[int, list[int]]:
    """Token ids of each choice of a stream."""
    found: dict[int, list[int]] = {}
    for event in text.split("\n\n"):
        if event.startswith("data: {"):
            [choice] = json.loads(event[6:])["choices"]
            found.setdefault(choice["index"], []).extend(choice["token_ids"])
    return found

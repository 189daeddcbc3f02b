"""HTTP as plain as it gets, so that answers may be wrong in every way."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MODELS = {"object": "list", "data": [{"id": "stub", "object": "model"}, {"id": "other", "object": "model"}]}


def event(fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def delta(finish_reason: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]})


def usage(num_prompt: int, num_output: int) -> bytes:
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    return event({"choices": [], "usage": counts})


DONE = b"data: [DONE]\n\n"


@dataclass
class Answer:
    """Status line, type and body; the body's parts are written one by one.

    Attributes:
        parts: bytes to write, or an event of the server's loop to wait for.
        is_cut: close the connection without the end of the body.
    """

    parts: list[bytes | asyncio.Event] = field(default_factory=list)
    status: int = 200
    content_type: str = "text/event-stream; charset=utf-8"
    is_cut: bool = False


class StubServer:
    """Serves on a free port of the loopback, in a thread of its own.

    Attributes:
        bodies: JSON of the requests for text, in the order in which they came.
        heads: their request lines and headers.
        most_at_once: requests under way at the same time.
    """

    def __init__(self, answer: Callable[[dict], Answer]) -> None:
        self._answer = answer
        self.bodies: list[dict] = []
        self.heads: list[str] = []
        self.most_at_once = self._num_running = 0
        self.models_status = 200
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop at once, whoever is connected."""

        async def stop() -> None:
            self._server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0].split(":")[1])) if lengths else b""
                if head.startswith("GET"):
                    text = json.dumps(MODELS).encode()
                    answer = Answer([text], self.models_status, "application/json")
                else:
                    self.heads.append(head)
                    self.bodies.append(json.loads(body))
                    answer = self._answer(self.bodies[-1])
                self._num_running += 1
                self.most_at_once = max(self.most_at_once, self._num_running)
                try:
                    await self._write(writer, answer)
                finally:
                    self._num_running -= 1
                if answer.is_cut:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _write(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        head = f"HTTP/1.1 {answer.status} Said\r\ncontent-type: {answer.content_type}\r\n"
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        for part in answer.parts:
            if isinstance(part, asyncio.Event):
                await part.wait()
                continue
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
            # Parts leave one by one.
            await asyncio.sleep(0)
        if not answer.is_cut:
            writer.write(b"0\r\n\r\n")
        await writer.drain()

"""Client of ``benchmarks.http_cost``: reads streams with as little work as possible.

A line of JSON says what to read; each further line reads it once, and is answered with the number of events.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

_FIELDS = {"temperature": 0, "ignore_eos": True, "stream": True}


async def read_stream(port: int, tokens: list[int], num_new: int) -> int:
    """Read one stream to its end; returns its number of events, but for ``[DONE]``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": tokens, "max_tokens": num_new, **_FIELDS}).encode()
    fields = (
        "Host: x",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(body)}",
    )
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *fields, "", ""))
    writer.write(head.encode() + body)
    pieces = []
    while piece := await reader.read(1 << 16):
        pieces.append(piece)
    writer.close()
    return b"".join(pieces).count(b"data: ") - 1


async def read_all(asked: dict[str, Any]) -> int:
    """Read every stream at once."""
    streams = (read_stream(asked["port"], tokens, asked["num_new"]) for tokens in asked["prompts"])
    return sum(await asyncio.gather(*streams))


def main() -> None:
    """Read what standard input asks for, whatever scheduling the parent has."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    asked = json.loads(sys.stdin.readline())
    for _ in sys.stdin:
        print(asyncio.run(read_all(asked)), flush=True)


if __name__ == "__main__":
    main()

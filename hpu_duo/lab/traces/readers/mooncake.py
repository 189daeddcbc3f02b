"""Mooncake: requests of Kimi with the blocks their prompts share (arXiv:2407.00079; kvcache-ai/Mooncake).

One JSON object per line: ``timestamp`` (milliseconds), ``input_length``, ``output_length``, and ``hash_ids``,
one for every 512 tokens of the prompt. Equal leading ids are equal prefixes. ``session_id``, which other
tools add, is read too, and so is ``user``, the OpenAI API's name for who sends a request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hpu_duo.lab.traces.arrival import Arrival
from hpu_duo.lab.traces.readers.rows import Row, json_lines

BLOCK_SIZE = 512
FIELDS = ("timestamp", "input_length", "output_length")


def read_mooncake(path: Path) -> Iterator[Arrival | None]:
    """Yield the requests of a Mooncake file; None for those without prompt or output.

    Raises:
        ValueError: a line is not of this format.
    """
    for row in json_lines(path):
        time = row.number("timestamp") / 1000
        prompt, output = row.count("input_length"), row.count("output_length")
        if not prompt or not output:
            yield None
            continue
        size = row.count("block_size") if "block_size" in row.fields else BLOCK_SIZE
        session, user = (_name(row.fields.get(field)) for field in ("session_id", "user"))
        yield Arrival(time, prompt, output, _ids(row), size, session=session, user=user)


def write_mooncake(path: Path, arrivals: Iterable[Arrival]) -> None:
    """Write a trace in this format; texts are left out.

    ``block_size``, which the format does not know, is written where it is not 512.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("w", encoding="utf-8") as file:
        for each in arrivals:
            fields: dict[str, Any] = {
                "timestamp": each.time_s * 1000,
                "input_length": each.num_prompt_tokens,
                "output_length": each.num_output_tokens,
                "hash_ids": list(each.block_ids),
            }
            if each.block_size != BLOCK_SIZE:
                fields["block_size"] = each.block_size
            if each.session is not None:
                fields["session_id"] = each.session
            if each.user is not None:
                fields["user"] = each.user
            file.write(json.dumps(fields) + "\n")


def _name(value: Any) -> str | None:
    return None if value is None else str(value)


def _ids(row: Row) -> tuple[int, ...]:
    ids = row.fields.get("hash_ids") or []
    if not isinstance(ids, list) or any(type(one) is not int for one in ids):
        raise ValueError(f"expected a list of whole numbers in 'hash_ids', {row.where}, got {str(ids)[:40]}")
    return tuple(ids)

"""Streams of completions, as callers read them."""

from __future__ import annotations

import json


def texts_and_ends(lines: list[str]) -> tuple[str, list[str]]:
    """Text of a stream, and what it says of its end."""
    text, ends = "", []
    for line in lines:
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            ends.append(data)
        elif "error" in (event := json.loads(data)):
            ends.append(event["error"]["code"])
        else:
            text += event["choices"][0]["text"]
            ends += [event["choices"][0]["finish_reason"]] if event["choices"][0]["finish_reason"] else []
    return text, ends

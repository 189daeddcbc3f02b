"""Take prompts, answers, keys and tokens out of lines of a log, from standard input to standard output.

A line of JSON, as ``hpu-duo serve --log-requests FILE --log-prompts`` writes them, loses the fields that hold
texts. Other lines of the server hold none: it logs no prompt and no answer.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

_TEXTS = {"prompt", "prompts", "messages", "input", "inputs", "text", "texts", "content", "output", "outputs"}
_SECRETS = (
    (re.compile(r"\b(hf_|sk-)[A-Za-z0-9_-]{4,}"), r"\1***"),
    (re.compile(r"(?i)\b(authorization: *bearer +)\S+"), r"\1***"),
    (re.compile(r"(?i)(--(?:api-key|ssl-keyfile-password)[ =])\S+"), r"\1***"),
    (re.compile(r"\b(\w*(?:TOKEN|API_KEY|PASSWORD|SECRET)=)\S+"), r"\1***"),
)


def redact(line: str) -> str:
    """The line without texts and secrets."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if isinstance(found, dict):
        line = json.dumps(_without_texts(found))
    for pattern, shown in _SECRETS:
        line = pattern.sub(shown, line)
    return line


def _without_texts(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: "***" if key in _TEXTS else _without_texts(value) for key, value in node.items()}
    return [_without_texts(one) for one in node] if isinstance(node, list) else node


if __name__ == "__main__":
    for each in sys.stdin:
        print(redact(each.rstrip("\n")))

"""Take prompts, answers, keys and tokens out of lines of a log, from standard input to standard output.

JSON anywhere in a line, as ``hpu-duo serve --log-requests FILE --log-prompts`` writes it and a journal or a
container engine puts a prefix before it, loses the fields that hold texts. JSON that ends in the middle is
cut behind the name of the first such field. All lines lose what looks like a key, a token or a password.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

_TEXTS = frozenset(
    {"prompt", "prompts", "messages", "input", "inputs", "text", "texts", "content", "output", "outputs"}
    | {"arguments", "reasoning", "reasoning_content", "query", "queries", "document", "documents"}
    | {"instructions", "suffix", "question", "answer", "answers", "response", "completion"}
    | {"token", "tokens", "token_ids", "prompt_token_ids", "bytes", "logprobs", "top_logprobs"}
)
_SECRET_NAME = r"(?:token|api[-_]?key|password|passwd|secret|credentials?)"
_SECRET_FIELD = re.compile(rf"(?i)(?:.*{_SECRET_NAME}|.*authorization|.*cookie)$")
_OPENING = re.compile(r"[\[{]")
_QUOTE = r"""\\*["']"""
_FIELD = re.compile(
    rf"(?i){_QUOTE}(?:{'|'.join(sorted(_TEXTS))}){_QUOTE}\s*:"
    r"""|\b(?:prompts?|messages)\s*[:=](?=\s*[\["'{])"""
)
# A word of a shell that is not taken out yet: quoted parts, with spaces, and escaped characters belong to it.
_WORD = r"""(?!["']?\*\*\*)(?:"(?:\\.|[^"\\])*(?:"|$)|'(?:\\.|[^'\\])*(?:'|$)|\\.|[^\s"'\\])+"""
_SCHEME = r"(?:(?:bearer|basic|digest|token) +)?"
_HEADER = r"[\w-]*(?:api[-_]?key|password|passwd|secret|(?:auth|access|hf)[-_]token)"
_SECRETS = (
    # A line of an env file is taken literally, to its end.
    (re.compile(rf"(?i)^(\s*(?:export )?\w*{_SECRET_NAME}=).+"), r"\1***"),
    (re.compile(r"\b(hf_|sk-)[A-Za-z0-9_-]{4,}"), r"\1***"),
    (re.compile(rf"(?i)(authorization(?:{_QUOTE})?\s*[:=]\s*(?:{_QUOTE})?{_SCHEME}){_WORD}"), r"\1***"),
    (re.compile(rf"(?i)\b(bearer +){_WORD}"), r"\1***"),
    (re.compile(r"(?i)\b((?:set-)?cookie: *).+"), r"\1***"),
    (re.compile(rf"(?i)(--[\w-]*{_SECRET_NAME}[ =]){_WORD}"), r"\1***"),
    (re.compile(rf"(?i)\b([\w-]*{_SECRET_NAME}=){_WORD}"), r"\1***"),
    (re.compile(rf"(?i)\b({_HEADER}(?:{_QUOTE})?: *){_WORD}"), r"\1***"),
    (re.compile(r"(://)[^\s\"'<>]*@"), r"\1***@"),
    (re.compile(r"(?<![\w/])[\w.%+-]+:[^\s@/\"']+@(?=\w)"), "***@"),
)


def redact(line: str) -> str:
    """The line without texts and secrets."""
    line = _without_fields(line)
    for pattern, shown in _SECRETS:
        line = pattern.sub(shown, line)
    return line


def _without_fields(line: str) -> str:
    """The line with its JSON written anew, cut at a field that stands in no complete JSON."""
    decoder, done, start, kept = json.JSONDecoder(), 0, 0, []
    while opening := _OPENING.search(line, start):
        try:
            found, end = decoder.raw_decode(line, opening.start())
            safe = _without_texts(found)
        except ValueError:
            start = opening.end()
            continue
        except RecursionError:
            return "".join(kept) + "***"
        if _FIELD.search(line, done, opening.end()):
            break
        kept.append(line[done : opening.start()])
        kept.append(line[opening.start() : end] if safe == found else json.dumps(safe))
        done = start = end
    if cut := _FIELD.search(line, done):
        return "".join(kept) + line[done : cut.end()] + " ***"
    return "".join(kept) + line[done:]


def _without_texts(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _safe(key, value) for key, value in node.items()}
    if isinstance(node, str):
        # A container engine keeps lines as strings of its own JSON.
        return redact(node)
    return [_without_texts(one) for one in node] if isinstance(node, list) else node


def _safe(name: str, value: Any) -> Any:
    if _SECRET_FIELD.match(name):
        return "***"
    if name.lower() in _TEXTS:
        # A number of tokens is no text.
        return value if isinstance(value, int | float | None) else "***"
    return _without_texts(value)


if __name__ == "__main__":
    # A log may hold anything, and is shown all the same.
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    for each in sys.stdin:
        print(redact(each.rstrip("\n")))

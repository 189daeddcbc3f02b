"""The choice of a model's tool parser, and grammars of forced tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from json import dumps, loads
from typing import Any

from hpu_duo.sampling.params import JSON_WHITESPACE, StructuredOutputs
from hpu_duo.server.tools.calls import CLOSE, OPEN, TAG, HermesParser, LlamaParser, ToolParser

Function = tuple[str, Mapping[str, Any] | None]
"""A name, and the JSON schema of the arguments; None = any object."""

_AS_MODELS_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Options of llguidance's JSON: white space as in Python's ``json``, and in chat templates."""
_FLEXIBLE = {"whitespace_pattern": JSON_WHITESPACE}
_SLASH = re.compile(r"(\\.)|[/\n]", re.DOTALL)
"""Characters that would end an expression between slashes, and escapes."""


def calls_grammar(
    parser: str,
    functions: Sequence[Function],
    *,
    is_one: bool,
    answer: StructuredOutputs | None = None,
    is_free: bool = False,
) -> str:
    """Return the grammar of one or more calls, in llguidance's dialect of Lark.

    The parser of the same name accepts all calls of the grammar.

    Args:
        parser: in ``PARSERS``.
        functions: that may be called, at least one.
        is_one: exactly one call.
        answer: format allowed in place of calls; None for none.
        is_free: any text is allowed in place of calls, and around them if they have tags.
    """
    if is_free:
        return _FREE[parser](functions, is_one)
    rules = _GRAMMARS[parser](functions, is_one, answer is not None)
    if answer is None:
        return f"start: calls\n{rules}"
    return f"start: calls | answer\nanswer: {_answer(answer)}\n{rules}"


def _hermes(functions: Sequence[Function], is_one: bool, has_answer: bool) -> str:
    calls = "call" if is_one else f"call ({dumps(chr(10))} call)*"
    call = f"{dumps(OPEN + chr(10))} body {dumps(chr(10) + CLOSE)}"
    return f"calls: {calls}\ncall: {call}\n{_body(functions, 'arguments')}"


def _llama3_json(functions: Sequence[Function], is_one: bool, has_answer: bool) -> str:
    calls = "body" if is_one else 'body ("; " body)*'
    # A call and other JSON have a common prefix, and have to consist of the same lexemes.
    body = _json_body if has_answer else _body
    return f"calls: {calls}\n{body(functions, 'parameters')}"


def _hermes_in_text(functions: Sequence[Function], is_one: bool) -> str:
    called = f"called: mark {dumps(chr(10))} body {dumps(chr(10) + CLOSE)}"
    start = "called | text" if is_one else "called* text"
    mark = f"mark[lazy]: /(.|\\n)*{OPEN}/\ntext: /(.|\\n)*/"
    return f"start: {start}\n{called}\n{mark}\n{_body(functions, 'arguments')}"


def _llama3_json_or_text(functions: Sequence[Function], is_one: bool) -> str:
    # Text that begins like a call would be parsed as one.
    text = rf"text: TEXT?{chr(10)}TEXT: /\s*[^{{\s](.|\n)*/ & ~/\s*{re.escape(TAG)}(.|\n)*/"
    return f"start: calls | text\n{text}\n{_llama3_json(functions, is_one, False)}"


def _body(functions: Sequence[Function], arguments: str) -> str:
    """Return the rules of a call's object.

    Args:
        arguments: name of the arguments in it. Their schema is a rule of its own, since its references begin
            at its own root.
    """
    rules = [_one_of(functions)]
    for number, (name, schema) in enumerate(functions):
        begin = f'{{"name": {dumps(name)}, "{arguments}": '
        rules.append(f"call_{number}: {dumps(begin)} arguments_{number} {dumps('}')}")
        rules.append(
            f"arguments_{number}: %json {dumps({**_object(schema), 'x-guidance': _AS_MODELS_WRITE})}"
        )
    return "\n".join(rules)


def _json_body(functions: Sequence[Function], arguments: str) -> str:
    """Return the rules of a call's object, as one schema for each function; see ``_body``."""
    rules = [_one_of(functions)]
    for number, (name, schema) in enumerate(functions):
        # References of a schema with an ``$id`` are relative to it, and this one becomes a part of another
        # one.
        own = {key: each for key, each in _object(schema).items() if key != "$id"}
        inner = _moved(own, f"#/properties/{arguments}")
        call = {
            "type": "object",
            "properties": {"name": {"const": name}, arguments: inner},
            "required": ["name", arguments],
            "additionalProperties": False,
            "x-guidance": _FLEXIBLE,
        }
        rules.append(f"call_{number}: %json {dumps(call)}")
    return "\n".join(rules)


def _one_of(functions: Sequence[Function]) -> str:
    return f"body: {' | '.join(f'call_{number}' for number in range(len(functions)))}"


def _object(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """A schema of arguments is one of an object, also if its type is missing."""
    return {"type": "object", **(schema or {})}


_VALUES = ("const", "enum", "default", "examples")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords with values that are no schemas, and those with members named by the schema's author."""


def _moved(schema: Any, place: str) -> Any:
    """Return a schema with references that are valid within another one."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {}
    for name, each in schema.items():
        if name in _VALUES:
            moved[name] = each
        elif name in _NAMED and isinstance(each, Mapping):
            moved[name] = {member: _moved(inner, place) for member, inner in each.items()}
        else:
            moved[name] = _moved(each, place)
    if isinstance(reference := moved.get("$ref"), str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved


def _answer(wanted: StructuredOutputs) -> str:
    match wanted.field:
        case "json":
            return f"%json {dumps({**loads(str(wanted.json)), 'x-guidance': _FLEXIBLE})}"
        case "json_object":
            return f"%json {dumps({'type': 'object', 'x-guidance': _FLEXIBLE})}"
        case "regex":
            return f"/{_SLASH.sub(_escaped, str(wanted.regex))}/"
        case "grammar":
            return f"%lark {{\n{wanted.grammar}\n}}"
        case _:
            return " | ".join(map(dumps, wanted.choice or ()))


def _escaped(found: re.Match[str]) -> str:
    return found[1] or {"/": r"\/", "\n": r"\n"}[found[0]]


_GRAMMARS: Mapping[str, Callable[[Sequence[Function], bool, bool], str]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
}
_FREE: Mapping[str, Callable[[Sequence[Function], bool], str]] = {
    "hermes": _hermes_in_text,
    "llama3_json": _llama3_json_or_text,
}

PARSERS: Mapping[str, Callable[[Collection[str] | None], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaParser,
}
"""Parsers by vLLM's names for ``--tool-call-parser``."""


def _detect_parser(chat_template: str | None) -> str | None:
    """The parser for the tool calls of a chat template; None if it has none of a known format."""
    if chat_template is None or "tools" not in chat_template:
        return None
    if OPEN in chat_template:
        return "hermes"
    if TAG in chat_template or '"parameters":' in chat_template:
        return "llama3_json"
    return None


def resolve_parser(name: str, chat_template: str | None = None) -> str | None:
    """Resolve a setting to the name of a parser; None for none.

    Args:
        name: ``auto``, ``none`` or one of ``PARSERS``.
        chat_template: for ``auto``.

    Raises:
        ValueError: another name.
    """
    if name == "none":
        return None
    if name == "auto":
        return _detect_parser(chat_template)
    if name not in PARSERS:
        raise ValueError(f"expected a tool call parser of auto, none, {', '.join(PARSERS)}, got {name!r}")
    return name


def make_parser(name: str, functions: Collection[str] | None = None) -> ToolParser:
    """Create a parser for one answer, by its name in ``PARSERS``.

    Args:
        functions: names that may be called; None for any.
    """
    return PARSERS[name](functions)

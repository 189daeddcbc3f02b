"""Grammars of answers that are nothing but calls, for requests that ask for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from json import dumps
from typing import Any

from hpu_duo.server.tools.hermes import CLOSE, OPEN

Function = tuple[str, Mapping[str, Any] | None]
"""A name, and the JSON schema of the arguments; None takes any object."""

_AS_MODELS_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Options of llguidance's JSON: blanks where Python's ``json`` puts them, as in chat templates."""


def calls_grammar(parser: str, functions: Sequence[Function], *, is_one: bool) -> str:
    """Return the grammar of one or more calls, in llguidance's dialect of Lark.

    The parser of the same name finds all calls that it allows.

    Args:
        parser: in ``PARSERS``.
        functions: any of them is called, at least one.
        is_one: exactly one call.
    """
    return _GRAMMARS[parser](functions, is_one)


def _hermes(functions: Sequence[Function], is_one: bool) -> str:
    start = "call" if is_one else f"call ({dumps(chr(10))} call)*"
    call = f"{dumps(OPEN + chr(10))} body {dumps(chr(10) + CLOSE)}"
    return f"start: {start}\ncall: {call}\n{_body(functions, 'arguments')}"


def _llama3_json(functions: Sequence[Function], is_one: bool) -> str:
    start = "body" if is_one else 'body ("; " body)*'
    return f"start: {start}\n{_body(functions, 'parameters')}"


def _body(functions: Sequence[Function], arguments: str) -> str:
    """Write the rules of a call's object.

    Args:
        arguments: name of the arguments in it. Their schema is a rule of its own, since its references begin
            at its own root.
    """
    rules = [f"body: {' | '.join(f'call_{number}' for number in range(len(functions)))}"]
    for number, (name, schema) in enumerate(functions):
        begin = f'{{"name": {dumps(name)}, "{arguments}": '
        rules.append(f"call_{number}: {dumps(begin)} arguments_{number} {dumps('}')}")
        # A schema of arguments is one of an object, also where it does not say so.
        said = {"type": "object", **(schema or {}), "x-guidance": _AS_MODELS_WRITE}
        rules.append(f"arguments_{number}: %json {dumps(said)}")
    return "\n".join(rules)


_GRAMMARS: Mapping[str, Callable[[Sequence[Function], bool], str]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
}

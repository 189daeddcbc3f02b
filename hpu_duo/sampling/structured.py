"""Texts that an output may be: JSON, a pattern, one of some strings, or a grammar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from json import dumps, loads
from typing import Any

from hpu_duo.sampling.field_error import FieldError

# One blank, or a new line and its indentation: a model that likes blanks could write them without end.
JSON_WHITESPACE = r"( |\n[ \t]{0,40})?"
"""The blanks between the parts of JSON, as a regular expression."""

_MANY = 2**20
"""More characters than this are no specification that somebody wrote."""


@dataclass(frozen=True)
class StructuredOutputs:
    """Exactly one of its fields says what the output is; names are vLLM's.

    Immutable, hashable and picklable. Nothing is compiled here: whether a schema or a pattern can be used is
    known when the engine compiles it, and a request that cannot be served is refused then.

    Args:
        json: a JSON schema, as a mapping or as text. Stored as text.
        json_object: any JSON object.
        regex: a regular expression that the whole output matches, in the syntax of Rust's ``regex``, without
            look-around and back references.
        choice: one of these strings. Stored as a tuple.
        grammar: a context-free grammar in llguidance's dialect of Lark.

    Raises:
        ValueError: not exactly one field, or a value that is none of its kind; the message names the field.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [each.name for each in fields(self) if getattr(self, each.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(each.name for each in fields(self))
            raise FieldError(
                "structured_outputs", f"expected exactly one of {names}, got {' and '.join(given) or 'none'}"
            )
        match given[0]:
            case "json":
                object.__setattr__(self, "json", _schema_text(self.json))
            case "choice":
                object.__setattr__(self, "choice", _choices(self.choice))
            case "json_object":
                if self.json_object is not True:
                    raise FieldError(
                        "structured_outputs.json_object", f"expected true or false, got {self.json_object!r}"
                    )
            case "regex" | "grammar" as name:
                _check_text(name, getattr(self, name))

    @property
    def field(self) -> str:
        """Name of the field that is set."""
        return next(each.name for each in fields(self) if getattr(self, each.name) not in (None, False))


def _schema_text(schema: object) -> str:
    if isinstance(schema, str):
        _check_text("json", schema)
        try:
            schema = loads(schema)
        except (ValueError, RecursionError) as error:
            raise FieldError(
                "structured_outputs.json", f"expected a JSON schema, got no JSON: {error}"
            ) from None
    if not isinstance(schema, Mapping):
        raise FieldError("structured_outputs.json", f"expected a JSON schema, an object, got {schema!r:.60}")
    try:
        text = dumps(dict(schema))
    except (TypeError, ValueError) as error:
        raise FieldError("structured_outputs.json", f"expected what JSON can hold: {error}") from None
    _check_text("json", text)
    return text


def _choices(choices: object) -> tuple[str, ...]:
    found = tuple(choices) if isinstance(choices, Iterable) and not isinstance(choices, (str, bytes)) else ()
    if not found or any(not isinstance(one, str) or not one for one in found):
        raise FieldError(
            "structured_outputs.choice",
            f"expected one or more strings that are not empty, got {choices!r:.60}",
        )
    if sum(map(len, found)) > _MANY:
        raise FieldError("structured_outputs.choice", f"expected at most {_MANY} characters")
    return found


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise FieldError(f"structured_outputs.{name}", f"expected a text that is not empty, got {text!r:.60}")
    if len(text) > _MANY:
        raise FieldError(
            f"structured_outputs.{name}", f"expected at most {_MANY} characters, got {len(text)}"
        )

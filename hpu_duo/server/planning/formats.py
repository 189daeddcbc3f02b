"""The response format of a request, compiled in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hpu_duo.sampling import FieldError, SamplingParams, StructuredOutputs
from hpu_duo.server.planning.plan import Served
from hpu_duo.server.protocol.errors import bad_value, unsupported
from hpu_duo.server.protocol.requests import GenerationRequest

_CLOSING = "additionalProperties"
_OF_SCHEMAS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref")
"""Keywords with which an object is not closed, since they define further members."""


def closed(schema: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return a schema with closed objects, as OpenAI requires for ``strict``.

    Schemas of ``allOf`` are unchanged: each of them defines some members of the same object.

    Args:
        field: of the request, for messages.

    Raises:
        ApiError: an object is explicitly open.
    """
    found = dict(schema)
    if found.get(_CLOSING) not in (None, False):
        raise bad_value(
            field, f"{field}: expected {_CLOSING} of false with strict, got {found[_CLOSING]!r:.60}"
        )
    is_object = "properties" in found or found.get("type") == "object" or "object" in _types(found)
    if is_object and not found.keys() & set(_COMBINED):
        found[_CLOSING] = False
    for name in _OF_SCHEMAS:
        if isinstance(inner := found.get(name), Mapping):
            found[name] = {key: _closed(each, field) for key, each in inner.items()}
    for name in _LISTS:
        if isinstance(several := found.get(name), list):
            found[name] = [_closed(each, field) for each in several]
    if "items" in found:
        found["items"] = _closed(found["items"], field)
    return found


def _closed(schema: Any, field: str) -> Any:
    return closed(schema, field) if isinstance(schema, Mapping) else schema


def _types(schema: Mapping[str, Any]) -> list[Any]:
    types = schema.get("type")
    return types if isinstance(types, list) else []


_RESPONSE_FORMAT, _STRUCTURED = "response_format", "structured_outputs"
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older fields, and their names in ``StructuredOutputs``."""

_SHORT_BYTES = 2**14
"""Schemas of shorter requests are read in the event loop."""

_KINDS = ("json", "json_object", "regex", "choice", "grammar")


async def format_of(request: GenerationRequest, served: Served) -> StructuredOutputs | None:
    """Return the compiled format of a request; None if it has none.

    Raises:
        ApiError: it cannot be served; the error names its field.
    """
    is_short = request.num_bytes <= _SHORT_BYTES
    found = _asked(request) if is_short else await asyncio.to_thread(_asked, request)
    if not found:
        return None
    if len(found) > 1:
        fields = list(found)
        raise bad_value(fields[1], f"{fields[1]}: expected no {fields[0]} with it")
    [(field, given)] = found.items()
    try:
        wanted = await asyncio.to_thread(partial(StructuredOutputs, **given))
    except FieldError as error:
        raise bad_value(field, f"{field}: {error.reason}") from error
    await compile_format(served, wanted, field)
    return wanted


async def compile_format(served: Served, wanted: StructuredOutputs, field: str) -> None:
    """Compile a format for the model, in a thread.

    Args:
        field: its name in the request.

    Raises:
        ApiError: it cannot be compiled.
    """
    try:
        await asyncio.to_thread(served.engine.prepare, SamplingParams(structured_outputs=wanted))
    except FieldError as error:
        raise bad_value(field, f"{field}: {error.reason}") from error


def _asked(request: GenerationRequest) -> dict[str, dict[str, Any]]:
    """Yield fields with a format, with arguments of ``StructuredOutputs``."""
    found: dict[str, dict[str, Any]] = {}
    if request.response_format is not None:
        given = _of_response_format(request.response_format)
        if given is not None:
            found[_RESPONSE_FORMAT] = given
    if request.structured_outputs:
        found[_STRUCTURED] = _of_structured_outputs(request.structured_outputs)
    for field, name in _GUIDED.items():
        value = getattr(request, field)
        if value is not None:
            found[field] = {name: value}
    return found


def _of_response_format(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments of ``StructuredOutputs``; None for plain text."""
    kind = given.get("type")
    read = _FORMATS.get(kind) if isinstance(kind, str) else None
    if read is None:
        kinds = ", ".join(_FORMATS)
        raise bad_value(
            _RESPONSE_FORMAT, f"{_RESPONSE_FORMAT}: expected type to be one of {kinds}, got {kind!r:.60}"
        )
    return read(given)


def _json_schema(given: Mapping[str, Any]) -> dict[str, Any]:
    inner = given.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise bad_value(
            _RESPONSE_FORMAT,
            f"{_RESPONSE_FORMAT}: expected an object in json_schema.schema, got {schema!r:.60}",
        )
    is_strict = isinstance(inner, Mapping) and inner.get("strict") is True
    return {"json": closed(schema, _RESPONSE_FORMAT) if is_strict else schema}


def _same(name: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    def read(given: Mapping[str, Any]) -> dict[str, Any]:
        if given.get(name) is None:
            raise bad_value(_RESPONSE_FORMAT, f"{_RESPONSE_FORMAT}: expected {name} with type {name!r}")
        return {name: given[name]}

    return read


_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any] | None]] = {
    "text": lambda given: None,
    "json_object": lambda given: {"json_object": True},
    "json_schema": _json_schema,
    "regex": _same("regex"),
    "choice": _same("choice"),
    "grammar": _same("grammar"),
}


def _of_structured_outputs(given: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(name for name in given.keys() - set(_KINDS) if given[name] not in (None, False))
    if unknown:
        raise unsupported(
            _STRUCTURED, f"{_STRUCTURED}: expected one of {', '.join(_KINDS)}, got {', '.join(unknown)}"
        )
    return {name: given[name] for name in _KINDS if given.get(name) not in (None, False)}

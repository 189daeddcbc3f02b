"""Choices written as a name and options: ``dlpm:quantum=4096,patience=inf``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any, TypeVar

Made = TypeVar("Made")


def call_with_options(what: str, text: str, makers: Mapping[str, Callable[..., Made]]) -> Made:
    """Call the factory of a name with its options.

    The arguments of a maker are its options. The type of a default is that of the option: str, int, float,
    or a class with a ``parse`` that reads a text.

    Args:
        what: is chosen, in error messages.
        text: ``name`` or ``name:option=value,option=value``.
        makers: by name.

    Raises:
        ValueError: no maker has this name, it has no such option, or the value is of another type or
            refused by the maker.
    """
    name, _, rest = text.partition(":")
    if name not in makers:
        raise ValueError(f"expected {what} to be one of {', '.join(makers)}, got {text!r}")
    options = signature(makers[name]).parameters
    values: dict[str, Any] = {}
    for assignment in rest.split(",") if rest else ():
        key, equals, value = assignment.partition("=")
        if not equals or key not in options or key in values:
            known = ", ".join(f"{option}=..." for option in options) or "none"
            raise ValueError(f"expected options of {what} {name!r} ({known}), got {assignment!r}")
        values[key] = _converted(f"{key} of {what} {name!r}", options[key], value)
    return makers[name](**values)


def _converted(what: str, option: Parameter, value: str) -> Any:
    kind = type(option.default)
    if kind is str:
        return value
    parse = getattr(kind, "parse", None)
    if parse is not None:
        return parse(value)
    try:
        return int(value) if kind is int else float(value)
    except ValueError:
        expected = "an integer" if kind is int else "a number"
        raise ValueError(f"expected {what} to be {expected}, got {value!r}") from None

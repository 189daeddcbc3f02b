"""Settings as fields: name, type, default and help of each are written once, for Python and for commands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

HEADS, ENGINE, LIMITS = "Heads", "Engine", "Limits"
"""Panels of the help of commands."""
NAME_AND_OPTIONS = "NAME[:OPTION=VALUE,...]"
"""Placeholder of a choice with options, see ``hpu_duo.option_spec``."""

Value = TypeVar("Value")
_KEY = "option"


@dataclass(frozen=True)
class Option:
    """A setting as a user sees it.

    Attributes:
        help: one sentence.
        panel: heading in the help of commands; None = not an option of commands.
        name: of the argument, and with dashes of the option; "" = the name of the field.
        flags: names on the command line, if not derived from ``name``.
        metavar: placeholder of the value in the help.
        unset: text in the help of commands for the default None.
        choices: all values that there are.
        is_size: on the command line a size with a unit, such as 4GiB.
    """

    help: str
    panel: str | None = None
    name: str = ""
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    unset: str | None = None
    choices: tuple[str, ...] = ()
    is_size: bool = False


def option(default: Value, help: str, panel: str | None = None, **rest: Any) -> Value:
    """Return a field of a dataclass that is a setting of users.

    Args:
        default: of the field.
        help, panel, rest: fields of ``Option``.
    """
    return cast(Value, field(default=default, metadata={_KEY: Option(help, panel, **rest)}))


@dataclass(frozen=True)
class Setting:
    """A field that is a setting.

    Attributes:
        field: of the dataclass.
        option: how users see it.
    """

    field: Field[Any]
    option: Option

    @property
    def name(self) -> str:
        """Name of the argument, and with dashes of the option."""
        return self.option.name or self.field.name

    @property
    def default(self) -> Any:
        """Default as users write it."""
        return self.field.default

    @property
    def kind(self) -> Any:
        """Type of the option of commands, without None: the last of bool, int, float, str and Path, or texts.

        The annotation is read as text, since some of its types need torch.
        """
        if str(self.field.type).startswith("tuple["):
            return list[str]
        named = set(str(self.field.type).split(" | "))
        kinds = {"bool": bool, "int": int, "float": float, "str": str, "Path": Path}
        return next((kind for name, kind in reversed(kinds.items()) if name in named), str)


def settings_of(config: Any) -> Iterator[Setting]:
    """Yield the settings among the fields of a dataclass, in order."""
    for each in fields(config):
        if _KEY in each.metadata:
            yield Setting(each, each.metadata[_KEY])


def check_choices(config: Any) -> None:
    """Raise ValueError unless each setting of a dataclass has one of its choices."""
    for setting in settings_of(config):
        value, choices = getattr(config, setting.field.name), setting.option.choices
        if choices and value not in choices:
            raise ValueError(f"expected {setting.name} to be one of {', '.join(choices)}, got {value!r}")

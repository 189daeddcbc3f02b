"""Every option of every command, and every argument of ``from_pretrained``, as users have them.

``frozen_options.txt`` changes only with a decision: a name that is taken away breaks somebody's command.
After it, ``python -m tests.cli.test_frozen_options`` writes the file again.
"""

from collections.abc import Iterator
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from hpu_duo import HPUDuoModel
from hpu_duo.cli.app import app

FILE = Path(__file__).with_name("frozen_options.txt")


def commands(command: Any, name: str = "hpu-duo") -> Iterator[tuple[str, Any]]:
    """Every command with its words."""
    yield name, command
    for word, each in getattr(command, "commands", {}).items():
        yield from commands(each, f"{name} {word}")


def line(option: Any) -> str:
    """Names, type, default and environment of an option or argument."""
    kind = option.type_descriptor.annotation
    words = [" ".join([*option.opts, *option.secondary_opts]), str(kind) if get_args(kind) else kind.__name__]
    words += [f"[{option.metavar}]"] if option.metavar else []
    words += ["many"] if option.multiple or option.nargs != 1 else []
    words += ["required"] if option.required else [f"= {_plain(option.default)}"]
    words += [f"${option.envvar}"] if option.envvar else []
    words += ["hidden"] if getattr(option, "hidden", False) else []
    return " ".join(words)


def _plain(default: Any) -> str:
    return str([*default]) if isinstance(default, list | tuple) else repr(str(default))


def frozen() -> str:
    """The text of the file."""
    lines = []
    for name, command in commands(typer.main.get_command(app)):
        options = sorted(line(option) for option in command.params if option.name != "help")
        lines += [name, *(f"    {option}" for option in options)]
    lines += ["HPUDuoModel.from_pretrained"]
    lines += sorted(f"    {name} = {default!r}" for name, default in arguments().items())
    return "\n".join(lines) + "\n"


def arguments() -> dict[str, Any]:
    """Keyword arguments with their defaults."""
    parameters = signature(HPUDuoModel.from_pretrained).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is Parameter.KEYWORD_ONLY}


@pytest.mark.skipif(
    not hasattr(typer.core.TyperOption, "bare_type"), reason="an earlier typer, with the types of click"
)
def test_options_and_arguments_are_those_that_users_have() -> None:
    assert frozen().splitlines() == FILE.read_text().splitlines()


if __name__ == "__main__":
    FILE.write_text(frozen())

"""Commands that pages show, and their parsers; ``python -m tests.docs.commands`` lists all of them."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer

from hpu_duo.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples" / "gaudi").glob("*.md")),
]
FENCED = re.compile(r"^ *```\w*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:^    \S.*\n)(?:^    .*\n)*", re.MULTILINE)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
PROJECT = ("benchmarks", "examples", "graphs", "hpu_duo", "tests")
"""Packages whose modules ``python`` may run."""


@dataclass(frozen=True)
class Shown:
    """A command as a page shows it.

    Attributes:
        page: the page.
        words: the command, ``hpu-duo``, ``make`` or ``python``, and its arguments.
        is_whole: shown in a block, and not within a sentence, where arguments may be left out.
    """

    page: Path
    words: tuple[str, ...]
    is_whole: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {shlex.join(self.words)}"


def _calls(text: str) -> Iterator[list[str]]:
    """The calls in lines of a shell: variables replaced, comments and environment left out."""
    values: dict[str, str] = {}
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        if assigned := re.fullmatch(r"\s*(\w+)=\"(.*)\"", line):
            values[assigned[1]] = assigned[2]
            continue
        line = re.sub(r"\$(\w+)", lambda name: values.get(name[1], name[0]), line.removeprefix("$ "))
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&")
            lexer.commenters, lexer.whitespace_split = "#", True
            words = list(lexer)
        except ValueError:  # a sample of output, or a quotation over several lines
            continue
        call: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= set(";|&"):
                yield call
                call = []
            elif call or not re.fullmatch(r"[A-Z_0-9]+=.*", word):
                call.append(word)


def _known(call: list[str]) -> tuple[str, ...] | None:
    """A call of ours in the form that ``parse`` takes, or None for other programs."""
    match [word.removeprefix(".venv/bin/") for word in call[:1]] + call[1:]:
        case ["hpu-duo" | "make" as name, *rest]:
            return (name, *rest)
        case ["python" | "python3", *rest] if _script(rest) is not None:
            return ("python", *rest)
        case ["torchrun", *rest] if "hpu_duo.cli" in rest:
            return ("hpu-duo", *rest[rest.index("hpu_duo.cli") + 1 :])
        case ["docker", *rest] if rest[3:6] == ["--entrypoint", "hpu-duo", "server"]:
            return ("hpu-duo", *rest[6:])
    return None


def _script(arguments: list[str]) -> Path | None:
    """The file of this project that ``python`` is to run, or None."""
    match arguments:
        case ["-m", module, *_] if module.split(".")[0] in PROJECT:
            path = ROOT / module.replace(".", "/")
            return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        case [script, *_] if script.split("/")[0] in PROJECT:
            return ROOT / script
    return None


def shown_commands() -> list[Shown]:
    """Commands of ours on all pages, each once for each page."""
    found: dict[Shown, None] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = [
            *FENCED.findall(text),
            *(re.sub("^    ", "", b, flags=re.M) for b in INDENTED.findall(text)),
        ]
        sentences = INLINE.findall(re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE))
        for piece, is_whole in [(one, True) for one in blocks] + [(one, False) for one in sentences]:
            for call in _calls(piece.replace("\n", " ") if not is_whole else piece):
                if words := _known(call):
                    found[Shown(page, words, is_whole)] = None
    return list(found)


@cache
def _built(application: typer.Typer) -> Any:
    return typer.main.get_command(application)


def _command(application: typer.Typer, words: tuple[str, ...]) -> tuple[Any, Any, int]:
    """The command that these words begin with, its parent's context, and the number of words that name it."""
    command = _built(application)
    context, used = None, 0
    while hasattr(command, "commands") and used < len(words):
        context = command.context_class(
            command, info_name=command.name, parent=context, **command.context_settings
        )
        if words[used] not in command.commands:
            raise ValueError(f"no command {' '.join(words)}")
        command, used = command.commands[words[used]], used + 1
    return command, context, used


def _parse_typer(application: typer.Typer, words: tuple[str, ...]) -> None:
    command, parent, used = _command(application, words)
    command.make_context(command.name, list(words[used:]), parent=parent)


def options_of(words: tuple[str, ...]) -> frozenset[str]:
    """Options of a command of ``hpu-duo``."""
    command, _, _ = _command(app, words)
    return frozenset(
        name for one in command.params for name in (*one.opts, *one.secondary_opts) if name[:2] == "--"
    )


class _Parsed(BaseException):
    """Raised behind a parser's last step, so that nothing runs."""


def _parse_argparse(arguments: tuple[str, ...], script: Path, is_whole: bool) -> None:
    """Run a script as far as it has read its arguments; within a sentence required ones may be missing."""
    read, fail = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.error

    def parse_only(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> None:
        read(parser, *given, **named)
        raise _Parsed

    def failed(parser: argparse.ArgumentParser, message: str) -> None:
        if is_whole or not message.startswith("the following arguments are required"):
            fail(parser, message)
        raise _Parsed

    with (
        patch.multiple(argparse.ArgumentParser, parse_args=parse_only, error=failed),
        patch.object(sys, "argv", [str(script), *arguments]),
        warnings.catch_warnings(),
        suppress(_Parsed),
    ):
        warnings.simplefilter("ignore")
        module = ".".join(script.relative_to(ROOT).with_suffix("").parts)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        raise ValueError(f"{script} did not parse its arguments")


def _parse_script(words: tuple[str, ...], is_whole: bool) -> None:
    script = _script(list(words))
    assert script is not None
    if not script.exists():
        raise ValueError(f"there is no {script}")
    arguments = words[2:] if words[0] == "-m" else words[1:]
    source = script.read_text(encoding="utf-8")
    if "typer.Typer(" in source:
        with patch.object(sys, "path", [str(script.parent), *sys.path]):
            application = runpy.run_path(str(script), run_name="shown")["app"]
        _parse_typer(application, arguments)
    elif "ArgumentParser(" in source:
        _parse_argparse(arguments, script, is_whole)
    elif arguments:
        raise ValueError(f"{script} takes no arguments")


def _check_make(words: tuple[str, ...]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, given, _ = word.partition("=")
        known = rf"\$\({name}\)" if given else rf"^(?:[\w ]+ )?{name}(?: [\w ]+)?:"
        if not re.search(known, makefile, re.MULTILINE):
            raise ValueError(f"the Makefile has no {word}")


def parse(shown: Shown) -> None:
    """Read a command by the parser that would run it, and run nothing.

    Raises:
        ValueError, SystemExit or an error of click: the parser refuses it.
    """
    name, *rest = shown.words
    words = tuple(rest)
    match name:
        case "make":
            _check_make(words)
        case "python":
            _parse_script(words, shown.is_whole)
        case "hpu-duo" if shown.is_whole:
            _parse_typer(app, words)
        case "hpu-duo" if words and words[0][:1].isalpha():
            named = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
            if unknown := named - options_of(words) - {"--help"}:
                raise ValueError(f"hpu-duo {words[0]} has no {', '.join(sorted(unknown))}")


if __name__ == "__main__":
    for each in shown_commands():
        print(each if each.is_whole else f"{each} (in a sentence)")

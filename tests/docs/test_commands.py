"""Every command that README, docs and guides show is one that its own parser reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.commands import ROOT, Shown, parse, shown_commands

README = ROOT / "README.md"


def refusal(shown: Shown) -> str | None:
    """The message of a parser that refuses a command, or None."""
    try:
        parse(shown)
    except (Exception, SystemExit) as error:  # typer brings a click of its own, which other versions do not
        return f"{shown}: {type(error).__name__} {error}"
    return None


@pytest.mark.parametrize("program", ["hpu-duo", "make", "python"])
def test_every_command_of_the_pages_is_read_by_its_parser(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = [one for one in shown_commands() if one.words[0] == program]
    assert len(shown) > 5
    assert [found for one in shown if (found := refusal(one)) is not None] == []


@pytest.mark.parametrize(
    "words",
    [
        ("hpu-duo", "serve", "--no-such-option"),
        ("hpu-duo", "evall", "passkey"),
        ("hpu-duo", "passkey", "--num-tokens", "many"),
        ("make", "tests"),
        ("python", "-m", "benchmarks.gpu", "--no-such-option"),
        ("python", "-m", "benchmarks.no_such_module"),
    ],
)
def test_a_wrong_command_is_found(words: tuple[str, ...]) -> None:
    assert refusal(Shown(README, words, is_whole=True)) is not None

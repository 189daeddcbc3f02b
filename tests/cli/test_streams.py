"""Standard streams of every kind: other encodings, closed and full ones, bytes that are no text."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

COMMAND = [sys.executable, "-m", "hpu_duo.cli"]
SHORT = ["passkey", "--num-tokens", "400", "--num-passkeys", "2", "--passkey-words", "1"]
FULL = Path("/dev/full")
BARE = {"LC_ALL": "C", "PYTHONUTF8": "0"}
full_device = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")


def run(
    *arguments: str | bytes,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
    **variables: str,
) -> subprocess.CompletedProcess[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    return subprocess.run(
        [*COMMAND, *arguments],
        env=environment | variables,
        stdout=stdout,
        stderr=stderr,
        check=False,
    )


@pytest.mark.slow
@full_device
def test_answers_are_marked_in_words_where_there_is_no_tick_and_notes_need_no_room() -> None:
    with FULL.open("wb") as full:
        done = run(*SHORT, stderr=full.fileno(), PYTHONIOENCODING="latin-1")
    assert done.returncode == 0
    assert b"2 of 2 passkeys found" in done.stdout
    assert b"yes " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", [["doctor"], ["pattern", "show", "hpu_duo/builtin/pattern"]])
def test_tables_fit_any_encoding(command: list[str]) -> None:
    done = run(*command, PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stderr
    assert b"\\u" not in done.stdout


@pytest.mark.slow
def test_a_chinese_prompt_is_utf_8_whatever_the_locale_says(hpu_duo: Callable[..., Result]) -> None:
    text = "\u4e2d\u6587"
    command = ["generate", "--max-new-tokens", "2", "--prompt", text, "--prompt", "b", "--stop", text]
    done = run(*(argument.encode() for argument in command), **BARE)
    assert done.returncode == 0, done.stderr
    assert f"prompt 1 of 2 (length): {text}".encode() in done.stdout
    # The locale of the tests is not asked here either: arguments and streams are decoded.
    assert done.stdout == hpu_duo(*command).stdout_bytes


@pytest.mark.parametrize(
    ("variables", "option", "name"),
    [(BARE, "--prompt", "prompt 1"), ({"LC_ALL": "C.UTF-8"}, "--stop", "--stop")],
)
def test_bytes_that_are_no_text_are_refused(variables: dict[str, str], option: str, name: str) -> None:
    done = run("generate", option, b"a\xff", "--prompt", "b", **variables)
    assert done.returncode == 2
    assert done.stderr.decode() == f"hpu-duo: error: expected UTF-8 text in {name}, got byte 0xff\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--help"],
        pytest.param(
            ["generate", "--prompt", "a", "--max-new-tokens", "200", "--ignore-eos"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_reader_that_has_had_enough_is_no_error(command: list[str]) -> None:
    process = subprocess.Popen([*COMMAND, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    # Closed before anything is written, so the first write finds nobody.
    process.stdout.close()
    told = process.stderr.read().decode()
    assert process.wait() == 0, told
    assert "rror" not in told


@pytest.mark.slow
@full_device
@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--help"],
        *(
            pytest.param(command, marks=pytest.mark.exhaustive)
            for command in (["generate", "--prompt", "a", "--max-new-tokens", "3"], SHORT)
        ),
    ],
)
def test_a_full_device_is_told_in_a_sentence(command: list[str]) -> None:
    with FULL.open("wb") as full:
        done = run(*command, stdout=full.fileno())
    assert done.returncode == 1
    told = "hpu-duo: error: cannot write to standard output: No space left on device\n"
    *before, last = done.stderr.decode().splitlines(keepends=True)
    assert last == told
    assert all(line.startswith("hpu-duo: cpu, ") for line in before), before


@pytest.mark.slow
def test_closed_streams_are_no_error() -> None:
    command = [*COMMAND, "pattern", "show", "hpu_duo/builtin/pattern"]
    done = subprocess.run(["bash", "-c", f"{' '.join(command)} >&- 2>&-"], check=False)
    assert done.returncode == 0

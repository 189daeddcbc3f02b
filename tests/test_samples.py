"""Samples of output in README, docs and examples are what the commands print, numbers apart."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from hpu_duo.cli.app import app
from tests.tiers import EXHAUSTIVE

ROOT = Path(__file__).parent.parent
CLI = (sys.executable, "-m", "hpu_duo.cli")

COMMANDS = {
    "A document of": (*CLI, "passkey"),
    "streaming heads ": (sys.executable, "examples/streaming_heads.py"),
}
"""Commands that print the samples, by the words that these begin with."""

NOT_RUN = {
    "launch: hpu-duo=": "needs a Gaudi",
    "launch: model on one Gaudi 3": "needs a Gaudi",
    "seconds = (operations": "a formula",
    "hpu_duo          requests": "a drawing",
    "graphs   1 (compile)": "the end of a warm-up that was killed; warmup/test_resuming.py has one",
}
"""Reasons not to compare other blocks, by the words that these begin with."""

TOOLS = {
    *("cat", "cd", "curl", "docker", "examples/gaudi/launch.sh", "hl-smi", "hpu-duo", "kubectl", "make"),
    *("pip", "python", "serve", "V/bin/pip", ".venv/bin/hpu-duo", ".venv/bin/pip"),
}
"""First words of commands; a block of nothing else has no output to compare."""


class Block(NamedTuple):
    """A code block without a language: its file and its text without the indentation."""

    file: str
    text: str


def blocks() -> list[Block]:
    """All of them, in README, the docs, the examples and the results of benchmarks."""
    folders = ("docs", "examples", "benchmarks")
    files = [
        ROOT / "README.md",
        *(file for folder in folders for file in sorted(ROOT.glob(f"{folder}/**/*.md"))),
    ]
    return [
        Block(str(file.relative_to(ROOT)), re.sub(f"^{found[1]}", "", found[3], flags=re.MULTILINE))
        for file in files
        for found in re.finditer(
            r"^( *)```(\w*)\n(.*?)^\1```", file.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
        if not found[2]
    ]


BLOCKS = blocks()
TRANSCRIPTS = [block for block in BLOCKS if block.text.startswith("$ ")]


def is_commands(text: str) -> bool:
    """Whether each line begins with a tool, or goes on with the line before."""
    lines = text.replace("\\\n", " ").splitlines()
    while lines:
        line = lines.pop(0)
        while lines and (line.count("'") % 2 or line.count('"') % 2):
            line += lines.pop(0)
        if line and line.split()[0] not in TOOLS and not re.match(r"\w+=", line):
            return False
    return True


def masked(text: str) -> str:
    """A text with ``#`` for each number and its unit, and one space between words, wherever lines end."""
    numbered = re.sub(r"\d[\d,.]*( ([KMG]i)?B\b)?", "#", text)
    return " ".join(numbered.split())


def sample(beginning: str) -> str:
    """The code block that begins with these words."""
    (found,) = [block.text for block in BLOCKS if block.text.lstrip().startswith(beginning)]
    return found


def printed(command: tuple[str, ...]) -> tuple[int, str]:
    """The exit status of a command and what it prints, masked."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    # Text goes to standard output and the closing table to standard error, which may have progress too.
    return done.returncode, masked(f"{done.stdout}\n{done.stderr}")


def test_masking_leaves_words_and_units_of_counts() -> None:
    assert masked("KV at peak  21.6 MiB held, 52.8% of\n\n  3,007 tokens x 2\n") == (
        "KV at peak # held, #% of # tokens x #"
    )


def test_commands_are_told_from_output() -> None:
    assert is_commands("limits=3\nhpu-duo serve \\\n  --x\n\ncurl -d '{\n 1}'\n")
    assert not is_commands("hpu-duo serve\nserving at 8000\n")


def test_each_block_is_of_commands_or_compared_or_has_a_reason() -> None:
    known = (*COMMANDS, *NOT_RUN, "$ ")
    others = [block for block in BLOCKS if not is_commands(block.text)]
    assert [block for block in others if not block.text.lstrip().startswith(known)] == []
    print(*(f"not compared, {reason}: {beginning}" for beginning, reason in NOT_RUN.items()), sep="\n")
    assert all(sample(beginning) for beginning in NOT_RUN)


# The example runs in test_examples.py too, and warm-ups in cli/test_warmup.py.
FURTHER = {"streaming heads "}


@pytest.mark.parametrize(
    "beginning", [pytest.param(each, marks=EXHAUSTIVE if each in FURTHER else ()) for each in COMMANDS]
)
def test_a_sample_is_what_its_command_prints(beginning: str) -> None:
    status, text = printed(COMMANDS[beginning])
    assert status == 0, text
    assert masked(sample(beginning)) in text


@pytest.mark.slow
@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=[block.file for block in TRANSCRIPTS])
def test_a_transcript_is_what_its_commands_print(
    tmp_path: Path, transcript: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its commands, one after another, in one directory and one process."""
    monkeypatch.chdir(tmp_path)
    for part in transcript.text.removeprefix("$ ").split("\n$ "):
        command, _, output = part.partition("\n")
        tool, *arguments = shlex.split(command)
        assert tool == "hpu-duo"
        done = CliRunner().invoke(app, arguments)
        assert masked(output) in masked(f"{done.stdout}\n{done.stderr}")
        assert bool(done.exit_code) == ("error:" in output)

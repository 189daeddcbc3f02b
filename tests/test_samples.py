"""Samples of output in README are what its commands print, numbers apart."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

COMMANDS = {
    "A document of": (sys.executable, "-m", "hpu_duo.cli", "passkey"),
    "streaming heads ": (sys.executable, "examples/streaming_heads.py"),
}
"""Commands that print the samples, by the words that these begin with."""


def masked(text: str) -> str:
    """A text with ``#`` for each number and its unit, and one space between words, wherever lines end."""
    numbered = re.sub(r"\d[\d,.]*( [KMG]iB)?", "#", text)
    return " ".join(numbered.split())


def sample(beginning: str) -> str:
    """The code block of README that begins with these words."""
    (found,) = re.findall(rf"^```\n({re.escape(beginning)}.*?)^```", README, re.DOTALL | re.MULTILINE)
    text: str = found
    return text


def test_masking_leaves_words_and_units_of_counts() -> None:
    assert masked("KV at peak  21.6 MiB held, 52.8% of\n\n  3,007 tokens x 2\n") == (
        "KV at peak # held, #% of # tokens x #"
    )


@pytest.mark.parametrize("beginning", COMMANDS)
def test_a_sample_is_what_its_command_prints(beginning: str) -> None:
    done = subprocess.run(COMMANDS[beginning], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    # Text goes to standard output and the closing table to standard error, which may have progress too.
    printed = masked(f"{done.stdout}\n{done.stderr}")
    assert masked(sample(beginning)) in printed

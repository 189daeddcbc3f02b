"""Common to all checks: the question that the built-in model answers, and how they tell what they saw."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

QUESTION = (
    "It was a quiet night. The passkey for Joel is loom actor camel. Remember it. "
    "The passkey for Nina is vase oats copper. Remember it. What is the passkey for Joel?"
)
ANSWER = " loom actor camel."
MESSAGES = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"count": {"enum": [1, 2, 3]}, "colour": {"enum": ["red", "blue"]}},
    "required": ["count", "colour"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "description": "Paint.", "parameters": SCHEMA}}
BUILTIN = Path(__file__).parents[3] / "hpu_duo" / "builtin" / "model"
"""The checkpoint that is served, for clients that want a tokenizer."""


class Told:
    """Takes down what a client did; the last line of its output is for the runner.

    Attributes:
        url: of the server.
        folder: for files.
        project_python: interpreter in which this project is installed.
    """

    def __init__(self) -> None:
        self.url, folder, self.project_python = sys.argv[1:]
        self.folder = Path(folder)
        self._seen: list[tuple[str, str]] = []

    def saw(self, what: str, detail: object = "") -> None:
        """Note that something was as it should be."""
        self._seen.append((what, str(detail)))

    def end(self, *packages: str) -> None:
        """Hand it to the runner.

        Args:
            packages: whose versions are told.
        """
        versions = {package: version(package) for package in packages}
        print("\n" + json.dumps({"versions": versions, "seen": self._seen}), flush=True)


def expect(found: Any, expected: Any) -> None:
    """Fail with both values unless they are equal."""
    if found != expected:
        raise AssertionError(f"expected {expected!r}, got {found!r}")


def check_painting(arguments: str | dict[str, Any]) -> None:
    """Fail unless arguments keep to the schema."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    expect(set(values), {"count", "colour"})
    expect((values["count"] in (1, 2, 3), values["colour"] in ("red", "blue")), (True, True))

"""RULER's own sentences, words and essays, read from a user's copy of its repository.

Scores can be compared with published ones only if the texts are the same. They are not shipped with this
project; the repository is public (NVIDIA/RULER), and its Python files are read, never run.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from hpu_duo.extras import install_command
from hpu_duo.lab.eval.ruler_questions import (
    OWN_TEXTS,
    DocumentQuestions,
    QuestionFormat,
    RulerTexts,
    TaskTemplate,
    read_questions,
)
from hpu_duo.lab.tasks.haystack import Haystack, TextHaystack

_SYNTHETIC = Path("scripts") / "data" / "synthetic"
_SPACES = re.compile(r"\s+")
_LFS_POINTER = "version https://git-lfs"
_LISTS = ("nounlist.txt", "adjectivelist.txt", "verblist.txt")


class EssayHaystack(TextHaystack):
    """A text that is read from its first sentence on, as RULER reads its essays."""

    def pieces(self, rng: Random) -> Iterator[str]:
        """The sentences in order from the first one, again and again."""
        while True:
            yield from self._pieces


def read_checkout(directory: Path) -> RulerTexts:
    """Texts of a copy of RULER's repository.

    Words come from the package wonderwords, as RULER's do. Without its essays, which a script of RULER
    downloads, there is no haystack; without its list of English words, which is in Git LFS, lists of words
    beyond those of wonderwords (some 80,000 tokens) are refused.

    Raises:
        ValueError: a file or the package is missing, or a file holds something else.
    """
    folder = directory / _SYNTHETIC
    constants, niah = (_read(folder / name) for name in ("constants.py", "niah.py"))
    found = _value(constants, "TASKS", folder / "constants.py")
    try:
        templates = {
            kind: TaskTemplate(found[kind]["template"], found[kind]["answer_prefix"])
            for kind in OWN_TEXTS.templates
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected templates of RULER in {folder / 'constants.py'}, got {error!r}") from None
    nouns, adjectives, verbs = (_wonderwords(name) for name in _LISTS)
    essays = folder / "json" / "PaulGrahamEssays.json"
    return RulerTexts(
        source=hashlib.sha256((constants + niah).encode()).hexdigest(),
        templates=templates,
        needle=_text(niah, "needle", folder / "niah.py"),
        noise=_text(niah, "haystack", folder / "niah.py"),
        adjectives=adjectives,
        nouns=nouns,
        words=sorted({*nouns, *adjectives, *verbs}),
        more_words=_english(folder / "json" / "english_words.json"),
        haystack=_essays(essays) if essays.is_file() else None,
    )


def find_questions(
    checkout: Path | None, squad: Path | None, hotpotqa: Path | None
) -> dict[str, DocumentQuestions]:
    """Questions by task: from the files named, or else from those in a copy of RULER that has them.

    Raises:
        ValueError: a file cannot be read or is of another format.
    """
    found = {}
    for task, kind, path in (
        ("qa_1", QuestionFormat.SQUAD, squad),
        ("qa_2", QuestionFormat.HOTPOTQA, hotpotqa),
    ):
        if path is None and checkout is not None:
            within = checkout / _SYNTHETIC / "json" / f"{kind.value}.json"
            path = within if within.is_file() else None
        if path is not None:
            found[task] = read_questions(path, kind)
    return found


def _essays(path: Path) -> Haystack:
    text = _json(path).get("text")
    if not isinstance(text, str):
        raise ValueError(f"expected a text in {path}, got {type(text).__name__}")
    return EssayHaystack(_SPACES.sub(" ", text))


def _english(path: Path) -> Sequence[str]:
    if not path.is_file() or _read(path).startswith(_LFS_POINTER):
        return ()
    return [str(word) for word in _json(path).values()]


def _wonderwords(name: str) -> Sequence[str]:
    found = find_spec("wonderwords")
    if found is None or not found.submodule_search_locations:
        raise ValueError(
            f"expected the package wonderwords for RULER's words ({install_command('ruler')}), got none"
        )
    lines = _read(Path(found.submodule_search_locations[0]) / "assets" / name).splitlines()
    return [line.rstrip() for line in lines]


def _text(source: str, name: str, path: Path) -> str:
    found = _value(source, name, path)
    if not isinstance(found, str):
        raise ValueError(f"expected {name} in {path} to be a text, got {found!r}")
    return found


def _value(source: str, name: str, path: Path) -> Any:
    """The first literal that a Python file assigns to a name, anywhere in it."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError as error:
        raise ValueError(f"expected Python in {path}, got {error}") from None
    for node in nodes:
        if isinstance(node, ast.Assign) and any(
            isinstance(to, ast.Name) and to.id == name for to in node.targets
        ):
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                continue
    raise ValueError(f"expected {path} to assign a literal to {name}, got none")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read(path))
    except ValueError as error:
        raise ValueError(f"expected JSON in {path}, got {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object in {path}, got {type(found).__name__}")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} of RULER's repository: {error}") from error

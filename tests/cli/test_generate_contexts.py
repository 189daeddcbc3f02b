"""``hpu-duo generate --context``: documents that are read once, saved and loaded."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from hpu_duo.cli.terminal import show_bytes
from tests.tiers import crossed

Run = Callable[..., Result]
DOCUMENT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 4
QUESTIONS = ("--prompt", "What struck?", "--prompt", "When?")
COMMON = ("--max-new-tokens", "5", "--ignore-eos", "--block-size", "16", "--dtype", "float32", "--json")


@pytest.fixture
def document(tmp_path: Path) -> Path:
    (tmp_path / "document.txt").write_text(DOCUMENT, encoding="utf-8")
    return tmp_path / "document.txt"


def completions(result: Result) -> list[list[int]]:
    assert result.exit_code == 0, result.stderr
    return [each["token_ids"] for each in json.loads(result.stdout)["completions"]]


def test_questions_are_answered_like_whole_prompts(hpu_duo: Run, model_dir: Path, document: Path) -> None:
    """Read, read and saved, and loaded."""
    saved = document.with_name("saved")
    whole = [text for question in QUESTIONS[1::2] for text in ("--prompt", DOCUMENT + question)]
    expected = completions(hpu_duo("generate", "--model", model_dir, *whole, *COMMON))
    ask = ("generate", "--model", model_dir, *QUESTIONS, *COMMON, "--context")
    first = hpu_duo(*ask, document, "--save-context", saved)
    assert completions(first) == expected
    again = hpu_duo(*ask, saved)
    assert completions(again) == expected
    fields = json.loads(again.stdout)
    held = len(DOCUMENT) // 16 * 16
    assert fields["context"].pop("seconds") > 0
    assert fields["context"] == {"num_tokens": len(DOCUMENT), "num_held_tokens": held, "is_loaded": True}
    assert all(each["num_cached_tokens"] >= held for each in fields["completions"])
    assert (
        fields["run"]["prefill"]["num_tokens"] < json.loads(first.stdout)["run"]["stats"]["num_prompt_tokens"]
    )


def test_the_table_tells_of_the_document(hpu_duo: Run, model_dir: Path, document: Path) -> None:
    result = hpu_duo("generate", "--model", model_dir, "--context", document, "--prompt", "When?")
    assert result.exit_code == 0, result.stderr
    assert f"{len(DOCUMENT)} tokens, read in" in result.stderr
    assert "of the tokens were there" in result.stderr


def _row(result: Result, name: str) -> str:
    """A row of the table, of which long ones are broken into lines."""
    lines = result.stderr.splitlines()
    [at] = [number for number, line in enumerate(lines) if line.startswith(name)]
    more = itertools.takewhile(lambda line: line.startswith("  "), lines[at + 1 :])
    return " ".join(" ".join([lines[at].removeprefix(name), *more]).split())


@pytest.mark.parametrize(("has_pattern", "has_context"), crossed([False, True], [False, True]))
def test_the_table_tells_the_bytes_of_the_prefix_cache(
    hpu_duo: Run, model_dir: Path, pattern_dir: Path, document: Path, has_context: bool, has_pattern: bool
) -> None:
    ask: tuple[object, ...] = ("generate", "--model", model_dir, *QUESTIONS, *COMMON[:-1])
    ask += ("--context", document) if has_context else ()
    ask += ("--pattern", pattern_dir, "--sparsity", 0.5) if has_pattern else ()
    prefixes = json.loads(hpu_duo(*ask, "--json").stdout)["run"]["stats"]["prefixes"]
    rate = prefixes["num_hit_tokens"] / prefixes["num_queried_tokens"]
    assert (rate > 0) is has_context
    assert (prefixes["snapshot_bytes"] > 0) is has_pattern
    expected = f"{rate:.1%} of the tokens were there, {show_bytes(prefixes['idle_bytes'])} idle"
    if prefixes["context_bytes"]:
        expected += f", {show_bytes(prefixes['context_bytes'])} in contexts"
    expected += f", {show_bytes(prefixes['snapshot_bytes'])} in snapshots"
    assert _row(hpu_duo(*ask), "prefix cache") == expected


def test_the_table_says_nothing_of_a_cache_that_is_not_there(hpu_duo: Run, model_dir: Path) -> None:
    ask = ("generate", "--model", model_dir, "--prompt", "a", "--no-enable-prefix-caching")
    assert "prefix cache" not in hpu_duo(*ask).stderr


def test_a_context_is_saved_without_any_question(hpu_duo: Run, model_dir: Path, document: Path) -> None:
    saved = document.with_name("saved")
    result = hpu_duo(
        "generate", "--model", model_dir, "--context", "-", "--save-context", saved, stdin=b"Hello"
    )
    assert result.exit_code == 0, result.stderr
    assert saved.exists()


def test_the_document_begins_a_message_of_a_chat(hpu_duo: Run, chat_model_dir: Path, document: Path) -> None:
    saved = document.with_name("saved")
    ask = ("generate", "--model", chat_model_dir, "--chat", *COMMON)
    expected = completions(hpu_duo(*ask, "--prompt", DOCUMENT + "When?"))
    assert (
        completions(hpu_duo(*ask, "--context", document, "--save-context", saved, *QUESTIONS[2:])) == expected
    )
    assert completions(hpu_duo(*ask, "--context", saved, *QUESTIONS[2:])) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--save-context", "x", "--prompt", "a"), "expected --context with --save-context"),
        (("--context", "-", "--file", "-"), "expected standard input once"),
        (("--context", "nowhere.txt", "--prompt", "a"), "cannot read the prompt file 'nowhere.txt'"),
        (("--context", "DOCUMENT"), "expected a prompt"),
        (
            ("--context", "DOCUMENT", "--prompt", "a", "--no-enable-prefix-caching"),
            "enable_prefix_caching=False",
        ),
        (("--context", "DOCUMENT", "--save-context", "nowhere/x", "--prompt", "a"), "nowhere does not exist"),
        (("--context", "WEIGHTS", "--prompt", "a"), "expected a context of hpu-duo"),
    ],
)
def test_what_does_not_go_together_is_refused(
    hpu_duo: Run, model_dir: Path, document: Path, options: tuple[str, ...], message: str
) -> None:
    paths = {"DOCUMENT": document, "WEIGHTS": model_dir / "model.safetensors"}
    given = [paths.get(option, option) for option in options]
    result = hpu_duo("generate", "--model", model_dir, *given)
    assert result.exit_code != 0
    assert message in " ".join(result.stderr.split())

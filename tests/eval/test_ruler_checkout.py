"""RULER's own texts, read from a copy of its repository; here one with sentences of our own."""

import json
from pathlib import Path
from random import Random

import pytest

from hpu_duo.lab.eval import RulerTask
from hpu_duo.lab.eval.ruler_checkout import find_questions, read_checkout
from hpu_duo.lab.eval.ruler_questions import OWN_TEXTS, TaskTemplate
from hpu_duo.lab.tasks.haystack import BuiltinHaystack

CONSTANTS = """
import nothing_that_is_there
TASKS = {
    kind: None for kind in ()
}
TASKS = %r
"""
NIAH = """
import nothing_that_is_there
needle = "A {type_needle_v} of {key} is: {value}."
if essay:
    haystack = read("essay")
elif noise:
    haystack = "Rain and rain."
"""


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the repository as far as it is read, and a package wonderwords."""
    folder = tmp_path / "RULER" / "scripts" / "data" / "synthetic"
    (folder / "json").mkdir(parents=True)
    templates = {
        kind: {"tokens_to_generate": 1, "template": f"T-{kind} {one.text}", "answer_prefix": one.prefix}
        for kind, one in OWN_TEXTS.templates.items()
    }
    (folder / "constants.py").write_text(CONSTANTS % templates)
    (folder / "niah.py").write_text(NIAH)
    (folder / "json" / "english_words.json").write_text(json.dumps({str(at): f"e{at}" for at in range(2000)}))
    text = "First one here.\n\nSecond one  here. " + "Last one here. " * 3
    (folder / "json" / "PaulGrahamEssays.json").write_text(json.dumps({"text": text}))
    assets = tmp_path / "packages" / "wonderwords" / "assets"
    assets.mkdir(parents=True)
    (assets.parent / "__init__.py").write_text("raise ImportError('is found, not imported')")
    for name in ("noun", "adjective", "verb"):
        (assets / f"{name}list.txt").write_text("".join(f"{name}{at} \n" for at in range(40)))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    return tmp_path / "RULER"


def test_templates_sentences_and_words_are_those_of_the_copy(checkout: Path) -> None:
    texts = read_checkout(checkout)
    assert texts.needle == "A {type_needle_v} of {key} is: {value}."
    assert texts.noise == "Rain and rain."
    assert (len(texts.words), texts.words[0], len(texts.more_words or ())) == (120, "adjective0", 2000)
    one = RulerTask("niah_single_1", words, 300, texts).sample(0)
    assert one.input.startswith("T-niah A secret number is hidden")
    assert one.input.count("Rain and rain.") > 20
    assert f"is: {one.outputs[0]}." in one.input
    listed = RulerTask("cwe", words, 1500, texts).sample(0)
    # 120 words do not suffice, so all come from the longer list.
    assert all(output.startswith("e") for output in listed.outputs)


def test_essays_are_read_from_their_beginning_again_and_again(checkout: Path) -> None:
    haystack = read_checkout(checkout).haystack
    assert haystack is not None
    pieces = haystack.pieces(Random(5))
    assert [next(pieces) for _ in range(6)] == [
        "First one here.",
        "Second one here.",
        *["Last one here."] * 3,
        "First one here.",
    ]
    one = RulerTask("niah_single_2", words, 250, read_checkout(checkout)).sample(1)
    assert one.input.partition("\n")[2].startswith(("First one here.", "A numbers of"))


def test_what_only_long_or_other_tasks_need_may_be_missing(checkout: Path) -> None:
    folder = checkout / "scripts" / "data" / "synthetic" / "json"
    (folder / "PaulGrahamEssays.json").unlink()
    (folder / "english_words.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0")
    texts = read_checkout(checkout)
    assert texts.haystack is None
    assert RulerTask("vt", words, 900, texts).sample(0).outputs
    with pytest.raises(ValueError, match="a haystack for needles in an essay, got none"):
        RulerTask("niah_multikey_1", words, 900, texts).sample(0)
    assert RulerTask("niah_multikey_1", words, 900, texts.with_haystack(BuiltinHaystack())).sample(0).outputs
    with pytest.raises(ValueError, match=r"list of at least \d+ words, got 0"):
        RulerTask("cwe", words, 1500, texts).sample(0)


def test_questions_are_taken_from_the_copy_unless_others_are_named(checkout: Path, tmp_path: Path) -> None:
    asked = [{"question": "What?", "answer": "this", "context": [["Title", ["Part."]]]}]
    within = checkout / "scripts" / "data" / "synthetic" / "json" / "hotpotqa.json"
    within.write_text(json.dumps(asked))
    other = tmp_path / "other.json"
    other.write_text(json.dumps([{**asked[0], "answer": "that"}]))
    assert find_questions(None, None, None) == {}
    assert find_questions(checkout, None, None)["qa_2"].questions[0].outputs == ("this",)
    assert find_questions(checkout, None, other)["qa_2"].questions[0].outputs == ("that",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("constants.py", "TASKS = {}", "templates of RULER"),
        ("constants.py", "TASKS = (", "expected Python"),
        ("constants.py", "OTHER = 1", "assign a literal to TASKS, got none"),
        ("niah.py", "needle = 5", "needle in .* to be a text, got 5"),
        ("json/english_words.json", "[]", "a JSON object"),
        ("json/PaulGrahamEssays.json", '{"text": 3}', "a text in"),
    ],
)
def test_a_copy_with_something_else_in_it_is_refused(
    checkout: Path, name: str, content: str, message: str
) -> None:
    (checkout / "scripts" / "data" / "synthetic" / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_checkout(checkout)


def test_a_missing_copy_or_package_is_named(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"cannot read .* of RULER's repository"):
        read_checkout(checkout / "elsewhere")
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(ValueError, match=r"package wonderwords .*\[ruler\]"):
        read_checkout(checkout)


def test_a_template_with_another_slot_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the slots context, query, got 'Read \{text\}'"):
        TaskTemplate("Read {text}", "").fill(context="x", query="y")

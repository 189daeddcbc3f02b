"""LongBench v2: reading, the prompt, the letter of an answer, and rows of the report."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpu_duo.lab.eval.longbench_v2 import PROMPT, choice_rows, chosen_letter, read_longbench_v2, read_prompt

ITEM: dict[str, Any] = {
    "_id": "1",
    "domain": "Stories",
    "sub_domain": "Short",
    "difficulty": "easy",
    "length": "short",
    "question": " Who sold the boat? ",
    "choice_A": "the baker",
    "choice_B": "the $Q$",
    "choice_C": "nobody",
    "choice_D": "all\n",
    "answer": "B",
    "context": "\nLong ago {x} the baker sold $C_D$ boat.",
}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_an_array_and_lines_give_the_same_items(tmp_path: Path) -> None:
    other = {**ITEM, "_id": "2", "context": "one\u2028two"}
    array = write(tmp_path / "a.json", json.dumps([ITEM, other], ensure_ascii=False))
    lines = write(
        tmp_path / "b.jsonl", "\n".join(json.dumps(one, ensure_ascii=False) for one in (ITEM, other))
    )
    assert read_longbench_v2(array) == read_longbench_v2(lines)
    assert [item.item_id for item in read_longbench_v2(array)] == ["1", "2"]


def test_marks_of_the_template_are_replaced_and_those_in_texts_stay(tmp_path: Path) -> None:
    (item,) = read_longbench_v2(write(tmp_path / "a.json", json.dumps([ITEM])))
    template = read_prompt(write(tmp_path / "p.txt", "<$DOC$> $Q$ (A) $C_A$ (B) $C_B$ (C) $C_C$ (D) $C_D$!"))
    assert item.prompt(template) == (
        "<Long ago {x} the baker sold $C_D$ boat.> Who sold the boat? (A) the baker (B) the $Q$ (C) nobody "
        "(D) all!"
    )
    assert "(B) the $Q$\n" in item.prompt(PROMPT)


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        ("The correct answer is (B)", "B"),
        ("So **The correct answer is (C)** for this", "C"),
        ("The correct answer is D.", "D"),
        # The letter in brackets comes first wherever it stands.
        ("The correct answer is A. No: The correct answer is (B).", "B"),
        ("the correct answer is (B)", None),
        ("The correct answer is (E)", None),
        ("B", None),
        ("", None),
    ],
)
def test_the_letter_is_read_from_the_words_asked_for(said: str, letter: str | None, tmp_path: Path) -> None:
    (item,) = read_longbench_v2(write(tmp_path / "a.json", json.dumps([ITEM])))
    assert chosen_letter(said) == letter
    assert item.score(said) == (letter == "B")


def test_rows_are_overall_by_difficulty_and_by_length() -> None:
    kv = {"kv_num_tokens": 10, "held_bytes": 5, "full_bytes": 10, "kv_num_texts": 1}
    groups = [("easy", "short", 1.0), ("hard", "short", 0.0), ("hard", "long", 1.0), ("hard", "long", 1.0)]
    records = [
        {"difficulty": difficulty, "length": length, "score": score, **kv}
        for difficulty, length, score in groups
    ]
    rows = choice_rows(records)
    assert [(row["group"], row["num_samples"], row["score"]) for row in rows] == [
        ("overall", 4, 0.75),
        ("easy", 1, 1.0),
        ("hard", 3, pytest.approx(2 / 3)),
        ("short", 2, 0.5),
        ("long", 2, 1.0),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "expected questions"),
        ("{half", "cannot read"),
        ("[3]", "JSON object as question 1"),
        (json.dumps([{**ITEM, "answer": "E"}]), "'answer' to be one of A, B, C, D in question 1"),
        (
            json.dumps([ITEM, {**ITEM, "length": 5}]),
            "'length' to be one of short, medium, long in question 2",
        ),
        (json.dumps([{**ITEM, "choice_C": None}]), "'choice_C' to be a text"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_longbench_v2(write(tmp_path / "a.json", content))


def test_a_prompt_without_its_marks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the marks"):
        read_prompt(write(tmp_path / "p.txt", "$DOC$ $Q$ $C_A$"))
    # Without the text, memory alone is asked: a prompt may leave the document out.
    assert read_prompt(write(tmp_path / "q.txt", "$Q$ $C_A$ $C_B$ $C_C$ $C_D$")).startswith("$Q$")
    with pytest.raises(ValueError, match="cannot read the prompt"):
        read_prompt(tmp_path / "missing.txt")

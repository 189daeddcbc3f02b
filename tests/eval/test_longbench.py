"""LongBench files: reading, prompts, cutting and scoring."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.lab.eval.longbench import DATASETS, cut_middle, prompt_text, read_longbench, read_prompts

ITEM: dict[str, Any] = {
    "input": "Who sold the {boat}?",
    "context": "Long ago {x} the baker sold a boat.",
    "answers": ["the baker", "a baker from the village"],
    "length": 7,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "1",
}


def write(path: Path, *items: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(item) for item in items) + "\n", encoding="utf-8")
    return path


def test_a_line_is_read_with_its_prompt_and_scored_against_the_best_answer(tmp_path: Path) -> None:
    (item,) = read_longbench(write(tmp_path / "x.jsonl", ITEM))
    assert prompt_text(item).startswith(ITEM["context"])
    assert ITEM["input"] in prompt_text(item)
    assert item.kind.max_new_tokens == 32
    assert item.score("The baker.") == 1.0
    # {baker, village} of {baker, from, village}: 2 * 2 / (2 + 3).
    assert item.score("baker village") == pytest.approx(0.8)


def test_the_official_prompts_are_taken_when_given(tmp_path: Path) -> None:
    path = tmp_path / "dataset2prompt.json"
    path.write_text(json.dumps({"hotpotqa": "T {context} Q {input} A"}), encoding="utf-8")
    (item,) = read_longbench(write(tmp_path / "x.jsonl", ITEM))
    assert prompt_text(item, read_prompts(path)) == f"T {ITEM['context']} Q {ITEM['input']} A"
    (other,) = read_longbench(write(tmp_path / "y.jsonl", {**ITEM, "dataset": "qasper"}))
    with pytest.raises(ValueError, match="prompt for 'qasper', got hotpotqa"):
        prompt_text(other, read_prompts(path))
    path.write_text('{"hotpotqa": "no place"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"texts with \{context\}"):
        read_prompts(path)


def test_a_line_ends_at_its_newline_only(tmp_path: Path) -> None:
    """JSON leaves Unicode's own line and paragraph separators in texts as they are."""
    text = "one\u2028two\u2029three\x85four"
    path = tmp_path / "x.jsonl"
    line = json.dumps({**ITEM, "context": text}, ensure_ascii=False)
    path.write_text(f"{line}\n{line}\n", encoding="utf-8")
    assert [item.context for item in read_longbench(path)] == [text, text]


@pytest.mark.parametrize(("name", "value"), [("all_classes", 3), ("length", [1]), ("length", "long")])
def test_optional_fields_of_another_type_are_refused(tmp_path: Path, name: str, value: object) -> None:
    path = write(tmp_path / "x.jsonl", ITEM, {**ITEM, name: value})
    with pytest.raises(ValueError, match=r"all_classes to be a list and length a number in line 2"):
        read_longbench(path)


def test_the_data_set_comes_from_the_line_or_else_from_the_caller(tmp_path: Path) -> None:
    bare = {name: value for name, value in ITEM.items() if name != "dataset"}
    assert read_longbench(write(tmp_path / "x.jsonl", bare), "trec")[0].dataset == "trec"
    assert read_longbench(write(tmp_path / "y.jsonl", {**ITEM, "dataset": "lcc_e"}))[0].dataset == "lcc"


def test_only_the_first_line_counts_where_the_model_goes_on_with_examples(tmp_path: Path) -> None:
    one = {**ITEM, "dataset": "trec", "answers": ["Animal"], "all_classes": ["Animal", "Sport"]}
    (item,) = read_longbench(write(tmp_path / "x.jsonl", one))
    assert item.score("\nAnimal\nQuestion: which Sport?") == 1.0


def test_every_data_set_has_a_metric_that_knows_its_own_answer(tmp_path: Path) -> None:
    assert len(DATASETS) == 21
    for name, kind in DATASETS.items():
        answer = "Paragraph 3" if kind.form == "paragraph" else "3" if kind.form == "count" else "north wind"
        one = {**ITEM, "dataset": name, "answers": [answer], "all_classes": ["north wind", "south"]}
        (item,) = read_longbench(write(tmp_path / f"{name}.jsonl", one))
        assert item.score(answer) == 1.0, name
        assert item.score("0 0 0") < 0.5, name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected questions"),
        ("{half\n", "JSON object in line 1"),
        ("[]\n", "JSON object in line 1"),
        (json.dumps({**ITEM, "answers": "x"}), "'answers' of type list"),
        (json.dumps({**ITEM, "answers": []}), "at least one answer"),
        (json.dumps({**ITEM, "dataset": "gsm8k"}), "expected one of the data sets .* got 'gsm8k'"),
        (json.dumps({"input": "x"}), "'context' of type str"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_longbench(path)
    with pytest.raises(ValueError, match="cannot read"):
        read_longbench(tmp_path / "missing.jsonl")


@given(st.lists(st.integers(), max_size=30), st.integers(1, 40))
def test_cutting_keeps_both_ends(tokens: list[int], most: int) -> None:
    cut = cut_middle(tokens, most)
    assert len(cut) == min(most, len(tokens))
    assert cut[: most // 2] == tokens[: most // 2]
    last = most - most // 2
    assert cut[-last:] == tokens[-last:]

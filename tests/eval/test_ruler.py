"""RULER's tasks: what a prompt holds, how long it is, and that it is the same everywhere."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from hpu_duo.lab.eval import RULER_TASKS, RulerSample, RulerTask, ruler_sample
from hpu_duo.lab.eval.ruler import QUESTION_TASKS, ruler_rows
from hpu_duo.lab.eval.ruler_questions import QuestionFormat, read_questions

WRITTEN = [task for task in RULER_TASKS if task not in QUESTION_TASKS]


def words(text: str) -> int:
    return len(text.split())


def sample(task: str, num_tokens: int = 1500, index: int = 0, seed: int = 0) -> RulerSample:
    return ruler_sample(task, words, num_tokens, index, seed)


def test_there_are_thirteen_tasks() -> None:
    assert len(RULER_TASKS) == 13
    assert [sample(task).max_new_tokens for task in WRITTEN] == [128] * 8 + [30, 120, 50]


@pytest.mark.parametrize("task", WRITTEN)
def test_a_sample_is_as_long_as_asked_for_but_never_longer(task: str) -> None:
    for num_tokens in (1200, 2000):
        for index in (0, 3):
            one = sample(task, num_tokens, index)
            assert one.length == words(one.prompt) + one.max_new_tokens == one.length_w_model_temp
            assert num_tokens - 40 < one.length <= num_tokens


@pytest.mark.parametrize("task", WRITTEN)
def test_tokens_around_the_prompt_count_as_well(task: str) -> None:
    one = RulerTask(task, words, 1500, num_around=30).sample(2)
    assert 1500 - 40 < one.length_w_model_temp == one.length + 30 <= 1500


@pytest.mark.parametrize("task", WRITTEN)
def test_samples_are_functions_of_task_index_and_seed(task: str) -> None:
    assert sample(task, index=2) == RulerTask(task, words, 1500).sample(2)
    assert len({sample(task, index=i, seed=j).input for i in range(3) for j in range(2)}) == 6


def test_samples_are_the_same_on_every_platform() -> None:
    """If this number changes, scores of before and after cannot be compared."""
    records = [sample(task, index=1, seed=5).as_record() for task in WRITTEN]
    digest = hashlib.sha256(json.dumps(records).encode()).hexdigest()
    assert digest[:16] == "f3cd83c7b1bd22a9"


@pytest.mark.parametrize("task", [task for task in WRITTEN if task.startswith("niah")])
def test_every_value_asked_for_lies_in_the_haystack_beside_its_key(task: str) -> None:
    one = sample(task)
    haystack, _, question = one.input.rpartition("\n")
    hidden = re.findall(r"One of the secret (?:numbers|uuids) of (\S+) is: (\S+)\.", haystack)
    asked = {value for key, value in hidden if key in question and key in one.answer_prefix}
    assert asked == set(one.outputs)
    assert len(one.outputs) == {"niah_multivalue": 4, "niah_multiquery": 4}.get(task, 1)
    many = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}
    assert len(hidden) == many.get(task, 1) or task in ("niah_multikey_2", "niah_multikey_3")
    assert one.score(one.answer_prefix + ", ".join(one.outputs)) == 1.0
    assert one.score("nothing") == 0.0
    before = one.input[: one.input.find(one.outputs[0])]
    assert one.as_record()["token_position_answer"] == words(before)


def test_one_value_is_asked_for_in_the_singular() -> None:
    single, multi = sample("niah_single_1"), sample("niah_multivalue")
    assert single.input.startswith("A secret number is hidden")
    assert single.answer_prefix.startswith(" The secret number of ")
    assert multi.input.startswith("Some secret numbers are hidden")
    assert re.search(r"numbers of \S+, \S+, \S+, and \S+ in", sample("niah_multiquery").input)


def test_needles_lie_at_one_of_forty_depths_of_an_essay() -> None:
    """A depth is a share of the sentences; here they are counted at their ends."""
    one = sample("niah_single_2", 3000)
    context = one.input.partition("\n")[2].rpartition("\n")[0]
    before, after = context.split("One of the secret")
    num_before = len(re.findall(r"\. ", before))
    num_after = len(re.findall(r"\. ", after.partition(". ")[2])) + 1
    total = num_before + num_after
    assert num_before in {int(total * round(100 * at / 39) / 100) for at in range(40)}


def test_the_variables_asked_for_are_those_that_follow_from_the_value() -> None:
    one = sample("vt")
    example, _, main = one.input.rpartition("\n\nBelow, variables")
    known = {re.findall(r"value (\d+)", main)[-1]}
    for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", main):
        if value in known:
            known.add(name)
    assert {name for name in known if name.isalpha()} == set(one.outputs)
    assert len(one.outputs) == 5
    # The example has names of three letters, and is solved.
    solved = example.splitlines()[-1].split()[-5:]
    assert set(re.findall(r"VAR (\w+) =", example)) == set(solved)
    assert {len(name) for name in solved} == {3}
    assert {len(name) for name in one.outputs} == {5}
    assert words(example) <= 500 + 5


@pytest.mark.parametrize(
    ("num_tokens", "example", "repeats"), [(1500, {3: 10, 1: 10}, (6, 1)), (5000, {10: 10, 3: 30}, (30, 3))]
)
def test_common_words_come_up_as_often_as_published(
    num_tokens: int, example: dict[int, int], repeats: tuple[int, int]
) -> None:
    one = sample("cwe", num_tokens)
    lists = [line for line in one.input.splitlines() if line.startswith("1. ")]
    assert len(lists) == 2
    counts = [Counter(re.findall(r"\d+\. (\S+)", line)) for line in lists]
    assert Counter(counts[0].values()) == example
    assert {word for word, often in counts[1].items() if often == repeats[0]} == set(one.outputs)
    assert set(counts[1].values()) == set(repeats)
    solved = re.findall(r"\d+\. (\S+)", one.input.splitlines()[2])
    assert {word for word, often in counts[0].items() if often == max(example)} == set(solved)


def test_frequent_words_follow_noise_and_a_vocabulary_by_length() -> None:
    one = sample("fwe", 5050)
    counts = Counter(one.input.partition("comes up. ")[2].partition("\n")[0].split())
    ranked = [word for word, _ in counts.most_common(4)]
    assert ranked == ["...", *one.outputs]
    # Frequencies are those of Zipf's law with exponent 2: a quarter, a ninth, a sixteenth of the noise.
    for rank, word in enumerate(ranked, start=1):
        assert counts[word] == pytest.approx(counts["..."] / rank**2, abs=1)
    # (5050 - 50) / 50 words, the last of which are too rare to come up.
    assert 30 < len(counts) <= 100


def test_an_unknown_task_and_a_budget_that_is_too_small_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a task among niah_single_1.*got 'niah'"):
        sample("niah")
    with pytest.raises(ValueError, match=r"num_tokens of at least \d+ for cwe, got 300"):
        sample("cwe", 300)
    with pytest.raises(ValueError, match="file of questions for qa_1"):
        sample("qa_1")


@pytest.fixture
def squad(tmp_path: Path) -> Path:
    """Three articles of four paragraphs, each with a question that can be answered and one that cannot."""

    def paragraph(article: int, at: int) -> dict[str, object]:
        name = f"{article}.{at}"
        answers = [{"text": f"answer {name}"}, {"text": f"other {name}"}]
        asked = [{"question": f"What of {name}?", "answers": answers, "is_impossible": False}]
        asked.append({"question": "Why?", "answers": [], "is_impossible": True})
        return {"context": f"Text {name} says answer {name} at length.", "qas": asked}

    articles = [{"paragraphs": [paragraph(one, at) for at in range(4)]} for one in range(3)]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": articles}))
    return path


def test_questions_come_with_their_own_documents_first(squad: Path) -> None:
    questions = {"qa_1": read_questions(squad, QuestionFormat.SQUAD)}
    assert (len(questions["qa_1"].questions), len(questions["qa_1"].documents)) == (12, 12)
    # 32 tokens of answer, some 30 around the documents, 9 for each of them.
    one = RulerTask("qa_1", words, 120, questions=questions).sample(5)
    texts = re.findall(r"Document (\d+):\nText (\d)\.(\d)", one.input)
    assert [int(number) for number, *_ in texts] == list(range(1, len(texts) + 1))
    # The four paragraphs of its article come first, in any order, and then two of others.
    assert len(texts) == 6
    assert {at for _, article, at in texts if article == "1"} == set("0123")
    fewer = RulerTask("qa_1", words, 90, questions=questions).sample(5).input
    assert set(re.findall(r"Text (\d)", fewer)) == {"1"}
    assert "Text 1.1" in fewer
    assert one.outputs == ("answer 1.1", "other 1.1")
    assert (one.score("It is OTHER 1.1."), one.score("none")) == (1.0, 0.0)
    # With more room than documents they are repeated.
    many = RulerTask("qa_1", words, 400, questions=questions).sample(5)
    assert len(re.findall("Document", many.input)) > 12
    with pytest.raises(ValueError, match="at least 13 questions in the file, got 12"):
        RulerTask("qa_1", words, 120, questions=questions).sample(12)


def test_questions_over_several_documents_bring_all_of_them(tmp_path: Path) -> None:
    path = tmp_path / "hotpotqa.json"
    contexts = [[[f"Title {one}{at}", [f"Part {one}{at}.", " More."]] for at in range(3)] for one in range(4)]
    asked = [
        {"question": f"What {one}?", "answer": f"answer {one}", "context": each}
        for one, each in enumerate(contexts)
    ]
    path.write_text(json.dumps(asked))
    questions = {"qa_2": read_questions(path, QuestionFormat.HOTPOTQA)}
    one = RulerTask("qa_2", words, 150, questions=questions).sample(2)
    assert all(f"Title 2{at}\nPart 2{at}. More." in one.input for at in range(3))
    assert one.outputs == ("answer 2",)
    with pytest.raises(ValueError, match="num_tokens of at least"):
        RulerTask("qa_2", words, 80, questions=questions).sample(2)


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        ("{", QuestionFormat.SQUAD, "cannot read the questions"),
        ("[]", QuestionFormat.SQUAD, "a file in squad's format"),
        ('{"data": [{"paragraphs": [{"context": "x"}]}]}', QuestionFormat.SQUAD, "got KeyError"),
        ('[{"question": "x"}]', QuestionFormat.HOTPOTQA, "a file in hotpotqa's format"),
        ("[]", QuestionFormat.HOTPOTQA, "expected questions"),
    ],
)
def test_files_of_another_form_are_refused(
    tmp_path: Path, content: str, kind: QuestionFormat, message: str
) -> None:
    path = tmp_path / "questions.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_questions(path, kind)


def test_the_average_weighs_tasks_alike() -> None:
    kv = {"kv_num_tokens": 10, "held_bytes": 5, "full_bytes": 10, "kv_num_texts": 1}
    scores = [("vt", 100, 1.0), ("vt", 100, 0.0), ("vt", 100, 0.0), ("cwe", 100, 1.0), ("vt", 200, 0.5)]
    records = [{"task": task, "num_tokens": length, "score": score, **kv} for task, length, score in scores]
    rows = [(row["task"], row["num_tokens"], row["num_samples"], row["score"]) for row in ruler_rows(records)]
    third = pytest.approx(1 / 3)
    assert rows == [
        ("vt", 100, 3, third),
        ("cwe", 100, 1, 1.0),
        ("average of 2", 100, 4, pytest.approx(2 / 3)),
        ("vt", 200, 1, 0.5),
    ]


def test_answers_are_cleaned_as_published() -> None:
    one = sample("niah_single_1")
    assert one.score(f"\x00 {one.outputs[0]}\x07") == 1.0
    assert one.score(one.outputs[0][:3] + "\x1f" + one.outputs[0][3:]) == 0.0

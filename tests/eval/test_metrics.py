"""Metrics against values worked out by hand, and against other implementations where there are some."""

from difflib import SequenceMatcher

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.lab.eval import metrics

rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")

WORDS = st.lists(st.sampled_from(["a", "b", "c", "the", "dog", "42"]), max_size=9).map(" ".join)


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        # Common: {tower}; precision 1/3, recall 1/2.
        ("a tall steel tower", "eiffel tower", 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),
        # Two of the three cats count: 2 * 2 / (3 + 2).
        ("cat cat cat", "cat cat", 0.8),
        ("no", "yes", 0.0),
        ("", "yes", 0.0),
        ("the", "the", 0.0),
    ],
)
def test_f1_of_words_is_as_worked_out(prediction: str, reference: str, expected: float) -> None:
    assert metrics.qa_f1(prediction, reference) == pytest.approx(expected)


def test_f1_of_characters_passes_over_punctuation_of_both_kinds() -> None:
    assert metrics.qa_f1_zh("北京。", "北 京!") == 1.0
    # One of two and one of three characters are common.
    assert metrics.qa_f1_zh("北海", "北京市") == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        # "the cat the mat" is common: 4 of 6 and 4 of 5 words.
        ("the cat sat on the mat", "the cat the mat slept", 8 / 11),
        ("Police killed the gunman", "police kill the gunman", 0.75),
        ("b a", "a b", 0.5),
        ("", "a", 0.0),
    ],
)
def test_rouge_l_is_as_worked_out(prediction: str, reference: str, expected: float) -> None:
    assert metrics.rouge_l(prediction, reference) == pytest.approx(expected)


@given(WORDS, WORDS)
def test_rouge_l_is_that_of_the_rouge_score_package(prediction: str, reference: str) -> None:
    scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=False)
    expected = scorer.score(reference, prediction)["rougeL"].fmeasure
    assert metrics.rouge_l(prediction, reference) == pytest.approx(expected)


@given(st.text("abc", max_size=12), st.text("abc", max_size=12))
def test_the_common_subsequence_is_that_of_the_table(first: str, second: str) -> None:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, one in enumerate(first):
        for j, other in enumerate(second):
            longer = max(table[i][j + 1], table[i + 1][j])
            table[i + 1][j + 1] = table[i][j] + 1 if one == other else longer
    expected = 2 * table[-1][-1] / (len(first) + len(second)) if table[-1][-1] else 0.0
    assert metrics.rouge_l_zh(first, second) == pytest.approx(expected)


def test_classification_divides_by_the_classes_that_are_named() -> None:
    classes = ["Food", "Food product", "Animal", "Sport"]
    assert metrics.classification("Animal", "Animal", classes) == 1.0
    assert metrics.classification("Animal or Sport", "Animal", classes) == 0.5
    assert metrics.classification("Sport", "Animal", classes) == 0.0
    assert metrics.classification("nothing of the kind", "Animal", classes) == 0.0
    # "Food" is named only as part of the right class, so it does not count.
    assert metrics.classification("Food product", "Food product", classes) == 1.0
    # The other way round two classes are named, and neither is a part of the reference.
    assert metrics.classification("Food product", "Food", classes) == 0.5


def test_retrieval_and_count_are_shares_of_the_numbers_in_the_answer() -> None:
    assert metrics.retrieval("Paragraph 12", "Paragraph 12") == 1.0
    assert metrics.retrieval("12 or 7, no, 12", "Paragraph 12") == pytest.approx(2 / 3)
    assert metrics.retrieval("the first", "Paragraph 1") == 0.0
    assert metrics.retrieval("段落12", "段落12") == 1.0
    assert metrics.count("There are 5 in 20", "5") == 0.5
    assert metrics.count("five", "5") == 0.0
    with pytest.raises(ValueError, match="number of a paragraph"):
        metrics.retrieval("1", "none")


def test_code_similarity_looks_at_the_first_line_of_code() -> None:
    assert metrics.code_similarity("\n```python\n# a remark\nreturn x\nmore", "return x") == 1.0
    # "return " is common: 2 * 7 / (8 + 8) = 0.875, which rounds up.
    assert metrics.code_similarity("return y", "return x") == 0.88
    assert metrics.code_similarity("# only a remark", "return x") == 0.0
    assert metrics.code_similarity("", "") == 1.0


@given(st.text("xy =", max_size=10), st.text("xy =", max_size=10))
def test_code_similarity_is_never_below_that_of_matching_blocks(first: str, second: str) -> None:
    # Blocks found greedily are one common subsequence, and not always the longest.
    assert metrics.code_similarity(first, second) >= SequenceMatcher(None, first, second).ratio() - 0.005


def test_references_count_when_they_occur_anywhere() -> None:
    assert metrics.found_share("It is ABC and 12.", ["abc", "12", "13"]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="at least one reference"):
        metrics.found_share("x", [])

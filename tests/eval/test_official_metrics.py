"""LongBench's own numbers: pairs scored by its scripts, and rules that those pairs do not reach."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.lab.eval import metrics, official_metrics

PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "longbench_metric_pairs.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
BY_NAME = {
    "qa_f1": metrics.qa_f1,
    "qa_f1_zh": official_metrics.qa_f1_zh,
    "rouge": official_metrics.rouge_l,
    "rouge_zh": official_metrics.rouge_l_zh,
    "classification": official_metrics.classification,
    "retrieval": metrics.retrieval,
    "count": official_metrics.count,
    "code_sim": official_metrics.code_similarity,
}
SENTENCES = st.lists(st.sampled_from(["a", "b", "c", "the", "dog", ".", " "]), max_size=14).map(" ".join)


@pytest.mark.parametrize("name", BY_NAME)
def test_scores_are_those_of_the_original_scripts(name: str) -> None:
    """Predictions, references and scores were written by the original code; scores have six decimals."""
    if name.endswith("_zh"):
        pytest.importorskip("jieba")
    pairs = [pair for pair in PAIRS if pair["metric"] == name]
    assert len(pairs) >= 15
    for pair in pairs:
        score = BY_NAME[name](pair["prediction"], pair["reference"], pair.get("all_classes") or [])
        assert score == pytest.approx(pair["score"], abs=1e-6), pair


def test_all_pairs_are_read() -> None:
    assert len(PAIRS) == 215
    assert {pair["metric"] for pair in PAIRS} == set(BY_NAME)


def test_rouge_counts_distinct_words_over_all_sentences() -> None:
    # Common: {a, b} and {c}; three of three distinct words there, three of four here.
    assert official_metrics.rouge_l("a b a b. c d", "a b. c") == pytest.approx(2 * 0.75 / 1.75)
    # Textbook: the longest common subsequence of the whole texts, words as often as they occur.
    assert metrics.rouge_l("a b a b. c d", "a b. c") == pytest.approx(2 * 3 / 9)
    # Upper case and punctuation other than full stops stay.
    assert official_metrics.rouge_l("Dog,", "dog") == 0.0


@pytest.mark.parametrize(("prediction", "reference"), [("", "a"), ("a", ""), ("...", "a"), ("x", "a")])
def test_rouge_of_texts_with_nothing_in_common_is_zero(prediction: str, reference: str) -> None:
    assert official_metrics.rouge_l(prediction, reference) == 0.0


def test_long_sentences_are_scored_and_not_given_up() -> None:
    text = " ".join(f"w{number}" for number in range(1200))
    assert official_metrics.rouge_l(text, text) == pytest.approx(1.0)


@given(SENTENCES, SENTENCES)
def test_rouge_is_that_of_the_rouge_package(prediction: str, reference: str) -> None:
    """Needs the package, which comes with the development tools."""
    rouge = pytest.importorskip("rouge")
    try:
        expected = rouge.Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
    except ValueError:
        expected = 0.0
    assert official_metrics.rouge_l(prediction, reference) == pytest.approx(expected)


def test_a_class_behind_one_that_is_removed_is_passed_over() -> None:
    """The original walks through the list from which it removes."""
    classes = ["real", "estate", "real estate"]
    assert metrics.classification("real estate", "real estate", classes) == 1.0
    assert official_metrics.classification("real estate", "real estate", classes) == 0.5
    # With another class between them both are removed.
    spaced = ["real", "Food", "estate", "real estate"]
    assert official_metrics.classification("real estate Food", "real estate", spaced) == 0.5


def test_percents_of_code_round_half_to_even() -> None:
    # 14 of 16 characters are in blocks: 87.5 %.
    assert official_metrics.code_similarity("return y", "return x") == 0.88
    # 12 of 16 and one more: 0.625 rounds down.
    assert official_metrics.code_similarity("abcdexyz", "abcdeuvw") == 0.62
    assert metrics.code_similarity("abcdexyz", "abcdeuvw") == 0.63
    assert official_metrics.code_similarity("", "") == 1.0
    assert official_metrics.code_similarity("", "x") == 0.0


def test_a_count_must_be_spelled_as_the_reference() -> None:
    assert official_metrics.count("5 of 20", "5") == 0.5
    assert official_metrics.count("05", "5") == 0.0
    assert official_metrics.count("none", "5") == 0.0


def test_chinese_words_are_those_of_the_dictionary() -> None:
    pytest.importorskip("jieba")
    # 北京 and 天安门 are words: one of two here and one of two there, where characters would give more.
    assert official_metrics.qa_f1_zh("北京。天安门", "北京 大学！") == 0.5
    assert metrics.qa_f1_zh("北京。天安门", "北京 大学！") == pytest.approx(2 * 2 / 9)


def test_a_missing_dictionary_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ValueError, match=r"package jieba .*\[longbench\]"):
        official_metrics.rouge_l_zh("北京", "北京")

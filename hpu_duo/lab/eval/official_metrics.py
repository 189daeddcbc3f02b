"""Metrics that give the numbers of LongBench's own scripts, to compare with published scores.

They are written from the behaviour of LongBench's ``metrics.py`` and of the packages that it calls (rouge
1.0.1, fuzzywuzzy 0.18 without python-Levenshtein, jieba 0.42), peculiarities included. ``metrics.py`` beside
this file has what textbooks mean by the same names. All take ``(prediction, reference, classes)`` and return
a number in [0, 1].

Source: Bai et al. 2024, arXiv:2308.14508, and its public repository.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from difflib import SequenceMatcher

from hpu_duo.extras import install_command
from hpu_duo.lab.eval.metrics import first_code_line, token_f1


def cut_words(text: str) -> list[str]:
    """Words of a text in order, spaces and punctuation among them; their concatenation is the text.

    Raises:
        ValueError: the package jieba is not there.
    """
    try:
        import jieba
    except ModuleNotFoundError as error:
        raise ValueError(
            f"expected the package jieba for Chinese words ({install_command('longbench')}), got: {error}"
        ) from None
    # It tells on stderr that it reads its dictionary.
    jieba.setLogLevel("WARNING")
    return list(jieba.cut(text, cut_all=False))


_NUMBER = re.compile(r"\d+")
_EPSILON = 1e-8
_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿"
    "–—‘’‛“”„‟…‧﹏."
)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def rouge_l(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L over sentences, as the package ``rouge`` computes it; 0 where it raises an error.

    A text is cut at full stops into sentences, and those at spaces into words; upper case and commas stay.
    The distinct words of all longest common subsequences of a sentence here and a sentence there are counted
    once, and divided by the distinct words of either text. The package skips sentences whose lengths
    add up to about a thousand words, for which the script then counts 0; they are computed here.
    """
    found, wanted = _sentences(prediction), _sentences(reference)
    if not found or not wanted:
        return 0.0
    common: set[str] = set()
    for one in wanted:
        for other in found:
            common.update(_common_words(one, other))
    recall = len(common) / len({word for sentence in wanted for word in sentence})
    precision = len(common) / len({word for sentence in found for word in sentence})
    return 2 * precision * recall / (precision + recall + _EPSILON)


def rouge_l_zh(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L of the words that jieba cuts."""
    return rouge_l(" ".join(cut_words(prediction)), " ".join(cut_words(reference)))


def qa_f1_zh(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the words that jieba cuts, in lower case, without punctuation and spaces."""
    return token_f1(*(_plain_words(text) for text in (prediction, reference)))


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """One divided by the number of classes that the answer names, if the right one is among them.

    Classes whose names are parts of the right one's do not count. The script removes them from the list that
    it walks through, and so passes over the one behind each, which counts whatever it is.
    """
    named = [name for name in classes if name in prediction]
    at = 0
    while at < len(named):
        name = named[at]
        if name in reference and name != reference:
            named.remove(name)
        at += 1
    return 1.0 / len(named) if reference in named else 0.0


def count(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that are spelled as the reference is."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Similarity of the first line of code by matching blocks, in whole percents, half ones to the even.

    Matching blocks are found greedily, the longest first; an empty line is unlike any but an empty reference.
    """
    code = first_code_line(prediction)
    if code == reference:
        return 1.0
    if not code or not reference:
        return 0.0
    return round(100 * SequenceMatcher(None, code, reference).ratio()) / 100


def _sentences(text: str) -> list[list[str]]:
    # Of a sentence of spaces one empty word remains, which counts as a word.
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _common_words(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Words of one longest common subsequence; of several, the one that drops late words of ``second``."""
    lengths = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, word in enumerate(first):
        above, here = lengths[i], lengths[i + 1]
        for j, other in enumerate(second):
            here[j + 1] = above[j] + 1 if word == other else max(above[j + 1], here[j])
    words: list[str] = []
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            words.append(first[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


def _plain_words(text: str) -> list[str]:
    words = ("".join(word.lower().translate(_NO_PUNCTUATION).split()) for word in cut_words(text))
    return [word for word in words if word]

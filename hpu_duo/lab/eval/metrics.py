"""Metrics: the match of an answer with its references, as numbers in [0, 1].

The definitions are those of LongBench (Bai et al. 2024, arXiv:2308.14508) and RULER (Hsieh et al. 2024,
arXiv:2404.06654), written from their description. Where a metric leaves a choice open, its docstring says
which one is made.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PUNCTUATION_ZH = str.maketrans(
    "",
    "",
    string.punctuation
    + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～、《》「」『』【】〔〕…—“”‘’",
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"\d+")

Metric = Callable[[str, str, Sequence[str]], float]
"""``(prediction, reference, all classes)``; only classification looks at the classes."""


def normalised_words(text: str) -> list[str]:
    """Words in lower case without punctuation and English articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def token_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the tokens as multisets; 0 when nothing is common."""
    common = sum((Counter(prediction) & Counter(reference)).values())
    return 2 * common / (len(prediction) + len(reference)) if common else 0.0


def qa_f1(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the normalised words."""
    return token_f1(normalised_words(prediction), normalised_words(reference))


def qa_f1_zh(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the characters without punctuation and spaces.

    LongBench cuts words with a dictionary; characters need none, and give other numbers.
    """
    return token_f1(_characters(prediction), _characters(reference))


def rouge_l(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the longest common subsequence of the words, in lower case.

    One sequence per text, without stemming, words being runs of letters and digits, as the ``rouge_score``
    package has it. LongBench's script calls the ``rouge`` package, which joins subsequences of sentences.
    """
    return _lcs_f1(*(re.findall(r"[a-z0-9]+", text.lower()) for text in (prediction, reference)))


def rouge_l_zh(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the longest common subsequence of the characters."""
    return _lcs_f1(_characters(prediction), _characters(reference))


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """One divided by the number of classes that the answer names, if the right one is among them.

    A class whose name is part of the right one's name does not count as named.
    """
    named = [name for name in classes if name in prediction]
    named = [name for name in named if name == reference or name not in reference]
    return 1.0 / len(named) if reference in named else 0.0


def retrieval(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that are the number of the right paragraph."""
    wanted = _NUMBER.search(reference)
    if wanted is None:
        raise ValueError(f"expected a reference with the number of a paragraph, got {reference!r}")
    return _share_equal(prediction, wanted.group())


def count(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that are the right number."""
    return _share_equal(prediction, reference.strip())


def code_similarity(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Similarity of the first line of code: 2 * common subsequence / both lengths, rounded to percents.

    Lines with a back quote, or that hold a comment mark, are passed over.
    """
    code = first_code_line(prediction)
    total = len(code) + len(reference)
    # Half a percent rounds up, whatever the number before it.
    return int(100 * 2 * _lcs(code, reference) / total + 0.5) / 100 if total else 1.0


def first_code_line(text: str) -> str:
    """First line without a back quote or a mark of a comment; empty if there is none."""
    lines = text.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")


def found_share(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that occur in the answer, upper and lower case alike (RULER)."""
    if not references:
        raise ValueError("expected at least one reference, got none")
    return sum(reference.lower() in prediction.lower() for reference in references) / len(references)


def found_any(prediction: str, references: Sequence[str]) -> float:
    """1 if any of the references occurs in the answer, else 0; upper and lower case are alike (RULER)."""
    return float(found_share(prediction, references) > 0)


def _share_equal(prediction: str, wanted: str) -> float:
    numbers = _NUMBER.findall(prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def _characters(text: str) -> list[str]:
    return [char for char in text.lower().translate(_PUNCTUATION_ZH) if not char.isspace()]


def _lcs_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    common = _lcs(prediction, reference)
    return 2 * common / (len(prediction) + len(reference)) if common else 0.0


def _lcs(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence.

    One big integer holds a row of the table, a bit per place of ``second``.

    Source: Hyyrö 2004, "Bit-parallel LCS-length computation revisited".
    """
    places: dict[str, int] = {}
    for at, item in enumerate(second):
        places[item] = places.get(item, 0) | 1 << at
    full = (1 << len(second)) - 1
    row = full
    for item in first:
        matches = row & places.get(item, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(second) - row.bit_count()

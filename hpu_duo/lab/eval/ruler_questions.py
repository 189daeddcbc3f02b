"""Questions with documents from SQuAD's and HotpotQA's files, for RULER's tasks qa_1 and qa_2.

The files are the user's: SQuAD 2.0's ``dev-v2.0.json`` and HotpotQA's ``hotpot_dev_distractor_v1.json``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class QuestionFormat(str, Enum):
    """Format of a file with questions."""

    SQUAD = "squad"
    HOTPOTQA = "hotpotqa"


@dataclass(frozen=True)
class DocumentQuestion:
    """A question about some of the documents.

    Attributes:
        query: the question.
        outputs: answers, any of which will do.
        documents: numbers of the documents that belong to it, all of which a prompt holds.
        related: numbers of documents of the same article, which a prompt takes before others.
    """

    query: str
    outputs: tuple[str, ...]
    documents: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class DocumentQuestions:
    """Questions of one file and all its documents, the latter in the order of their texts.

    Attributes:
        fingerprint: digest of the file.
    """

    questions: tuple[DocumentQuestion, ...]
    documents: tuple[str, ...]
    fingerprint: str


def read_questions(path: Path, kind: QuestionFormat) -> DocumentQuestions:
    """Read a file of questions that can be answered.

    Raises:
        ValueError: it cannot be read, or is of another form.
    """
    try:
        data = path.read_bytes()
        found = json.loads(data)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the questions in {path}: {error}") from error
    read: Callable[[Any], tuple[list[DocumentQuestion], list[str]]]
    match kind:
        case QuestionFormat.SQUAD:
            read = _squad
        case QuestionFormat.HOTPOTQA:
            read = _hotpotqa
    try:
        questions, documents = read(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"expected a file in {kind.value}'s format in {path}, got {error!r}") from None
    if not questions:
        raise ValueError(f"expected questions in {path}, got none")
    return DocumentQuestions(tuple(questions), tuple(documents), hashlib.sha256(data).hexdigest())


def _squad(found: Any) -> tuple[list[DocumentQuestion], list[str]]:
    articles = [article["paragraphs"] for article in found["data"]]
    documents = sorted({paragraph["context"] for article in articles for paragraph in article})
    number = {text: at for at, text in enumerate(documents)}
    questions = []
    for article in articles:
        of_article = [number[paragraph["context"]] for paragraph in article]
        for paragraph, own in zip(article, of_article, strict=True):
            related = tuple(at for at in of_article if at != own)
            questions += [
                DocumentQuestion(asked["question"], _texts(asked["answers"]), (own,), related)
                for asked in paragraph["qas"]
                # SQuAD 1.1 has no such field, and no such questions.
                if not asked.get("is_impossible", False)
            ]
    return questions, documents


def _hotpotqa(found: Any) -> tuple[list[DocumentQuestion], list[str]]:
    texts = [[f"{title}\n{''.join(parts)}" for title, parts in asked["context"]] for asked in found]
    documents = sorted({text for each in texts for text in each})
    number = {text: at for at, text in enumerate(documents)}
    questions = [
        DocumentQuestion(asked["question"], (asked["answer"],), tuple(number[text] for text in each))
        for asked, each in zip(found, texts, strict=True)
    ]
    return questions, documents


def _texts(answers: Any) -> tuple[str, ...]:
    found = tuple(str(answer["text"]) for answer in answers)
    if not found:
        raise ValueError("a question without answers")
    return found

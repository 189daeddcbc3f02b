"""A tokenizer of one word for each token, some of them special, some of punctuation."""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

SPECIAL = (3, 16, 40, 41)
PUNCTUATION = tuple(range(5, 29, 3))


def save_words(directory: Path, vocab_size: int) -> None:
    """Write such a tokenizer beside a model."""
    words = {f"w{number}": number for number in range(vocab_size)}
    for number, mark in zip(PUNCTUATION, string.punctuation):
        del words[f"w{number}"]
        words[mark] = number
    named = [f"w{number}" for number in SPECIAL]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), additional_special_tokens=named
    )
    tokenizer.save_pretrained(directory)

"""Texts behind texts: tokens of one text, unless tokens that are kept would change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hpu_duo.context.saved import Document

NAMES = ["<s>", "a", "b", "c", "ab", "abc", "ca"]
MERGES = [("a", "b"), ("ab", "c"), ("c", "a")]


def _tokenizer() -> Any:
    tokenizer = Tokenizer(BPE({name: token for token, name in enumerate(NAMES)}, MERGES))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


TOKENIZER = _tokenizer()
TEXTS = st.text("abc", min_size=1, max_size=9)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, more=TEXTS, size=st.integers(1, 4), adds=st.booleans())
def test_kept_tokens_stay_and_the_text_is_that_of_both(text: str, more: str, size: int, adds: bool) -> None:
    document = Document.read(text, TOKENIZER, adds)
    kept = len(document.token_ids) // size * size
    longer = document.followed_by(more, kept, TOKENIZER)
    assert longer.token_ids[:kept] == document.token_ids[:kept]
    assert len(longer.token_ids) > kept
    assert TOKENIZER.decode(longer.token_ids, skip_special_tokens=True) == text + more == longer.text
    assert longer.token_ids.count(0) == adds
    whole = tuple(TOKENIZER(text + more, add_special_tokens=adds)["input_ids"])
    if whole[:kept] == document.token_ids[:kept] and len(whole) > kept:
        assert longer.token_ids == whole


def test_a_token_that_would_grow_into_the_question_is_kept() -> None:
    document = Document.read("cab", TOKENIZER)
    assert [NAMES[token] for token in document.token_ids] == ["<s>", "c", "ab"]
    assert [NAMES[t] for t in document.followed_by("c", 2, TOKENIZER).token_ids] == ["<s>", "c", "abc"]
    assert [NAMES[t] for t in document.followed_by("c", 3, TOKENIZER).token_ids] == ["<s>", "c", "ab", "c"]


def test_token_ids_are_appended_as_they_are() -> None:
    document = Document.read([1, 2], None)
    assert document.followed_by([3], 2, None).token_ids == (1, 2, 3)
    assert document.followed_by("c", 2, TOKENIZER).token_ids == (1, 2, 3)
    with pytest.raises(ValueError, match="without a tokenizer"):
        document.followed_by("c", 2, None)

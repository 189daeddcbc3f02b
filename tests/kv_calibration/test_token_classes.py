"""Classes of tokens against what their texts say, character by character."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.heads.eviction.fastgen import is_punctuation
from hpu_duo.lab.kv_calibration import TokenClassifier
from tests.kv_calibration.conftest import ALPHABET, SPECIAL

ASCII_MARKS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


@given(st.text(st.sampled_from(" \n\ta9.,;$…—«。_+é")) | st.text())
def test_punctuation_has_marks_and_nothing_else_but_white_space(text: str) -> None:
    found = [each for each in text if not each.isspace()]
    marks = [each for each in found if each in ASCII_MARKS or unicodedata.category(each)[0] == "P"]
    assert is_punctuation(text) == (len(marks) == len(found) > 0)


@given(st.lists(st.integers(0, len(SPECIAL) + len(ALPHABET) - 1), max_size=30))
def test_tokens_of_one_character_are_what_the_character_is(
    characters: PreTrainedTokenizerFast, ids: list[int]
) -> None:
    found = TokenClassifier(characters).classes(ids)
    texts = [[*SPECIAL, *ALPHABET][each] for each in ids]
    assert found.special.tolist() == [text in SPECIAL for text in texts]
    assert found.punctuation.tolist() == [len(text) == 1 and text in ASCII_MARKS for text in texts]


@pytest.fixture(scope="module")
def of_bytes() -> PreTrainedTokenizerFast:
    """Bytes, spaces with a mark of their own, and a mark of a chat template that no special token names."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "."), ("Ġ", "a"), (".", ".")]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|...|>", special=True)])
    tokenizer.add_tokens([AddedToken("-->", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|...|>")


def test_marks_of_templates_are_special_and_marks_behind_spaces_are_punctuation(
    of_bytes: PreTrainedTokenizerFast,
) -> None:
    texts = ["<|...|>", "-->", "Ġ.", "Ġa", "..", "Ġ", "a"]
    found = TokenClassifier(of_bytes).classes(of_bytes.convert_tokens_to_ids(texts))
    assert found.special.tolist() == [True, False, False, False, False, False, False]
    assert found.punctuation.tolist() == [False, True, True, False, True, False, False]


def test_a_byte_that_is_part_of_a_character_is_no_punctuation(of_bytes: PreTrainedTokenizerFast) -> None:
    ids = of_bytes("…", add_special_tokens=False)["input_ids"]
    assert len(ids) == 3
    assert not TokenClassifier(of_bytes).classes(ids).punctuation.any()


def test_words_and_marks_of_the_built_in_model() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    ids = tokenizer("The passkey for Ada is walrus. Remember it.")["input_ids"]
    found = TokenClassifier(tokenizer).classes(ids)
    texts = [tokenizer.decode([each]).strip() for each in ids]
    assert found.punctuation.tolist() == [text == "." for text in texts]
    assert found.punctuation.sum() == 2
    assert found.special.tolist() == [each in tokenizer.all_special_ids for each in ids]

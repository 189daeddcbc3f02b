"""The passkey documents that the built-in model, head identification and the evaluation share."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.lab.tasks import words
from hpu_duo.lab.tasks.passkeys import NEEDLE, PasskeyDocument, document, question


def count_words(text: str) -> int:
    return len(text.split())


def word_index_of_needles(written: PasskeyDocument) -> list[int]:
    return [count_words(written.text.split(passkey.needle)[0]) for passkey in written.passkeys]


def test_equal_seeds_give_the_recorded_text_on_every_platform() -> None:
    written = document(count_words, num_tokens=500, num_passkeys=4, passkey_words=6, seed=7)
    digest = hashlib.sha256((written.text + question(written.passkeys[0])).encode()).hexdigest()
    assert digest == "8b7454594aaea2a298f13f8845e8b412b0cc6e7181cba58ea7bf640ead97b85e"


def test_another_seed_gives_another_text() -> None:
    first, second = (document(count_words, 200, 2, 4, seed=seed) for seed in (0, 1))
    assert first.text != second.text
    assert first.passkeys != second.passkeys


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(300, 1500),
    num_passkeys=st.integers(0, 8),
    passkey_words=st.integers(1, 16),
    seed=st.integers(0, 2**40),
)
def test_every_document_keeps_its_budget_and_hides_each_passkey_once(
    num_tokens: int, num_passkeys: int, passkey_words: int, seed: int
) -> None:
    written = document(count_words, num_tokens, num_passkeys, passkey_words, seed)
    longest_sentence = 15
    assert num_tokens - longest_sentence <= count_words(written.text) <= num_tokens
    assert len(written.passkeys) == num_passkeys
    for passkey in written.passkeys:
        assert written.text.count(passkey.needle) == 1
        assert len(passkey.words) == passkey_words

    bare = written.text
    for passkey in written.passkeys:
        bare = bare.replace(passkey.needle, "")
    filler = {word.strip(".") for word in bare.split()}
    hidden = [word for passkey in written.passkeys for word in passkey.words]
    assert len(hidden) == len(set(hidden)), "a repeated word would make the answer ambiguous"
    assert filler.isdisjoint(hidden)


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_passkey_lies_at_the_asked_depth_to_within_a_sentence(depth: float) -> None:
    written = document(count_words, 1000, 1, 8, seed=3, depths=[depth])
    needle_words = count_words(written.passkeys[0].needle)
    filler_words = count_words(written.text) - needle_words
    longest_sentence = 15
    assert 0 <= word_index_of_needles(written)[0] - depth * filler_words < longest_sentence


def test_passkeys_are_listed_in_the_order_of_the_text() -> None:
    written = document(count_words, 1000, 4, 5, seed=5, depths=[0.8, 0.2, 0.6, 0.2])
    places = word_index_of_needles(written)
    assert places == sorted(places)
    assert [passkey.depth for passkey in written.passkeys] == [0.2, 0.2, 0.6, 0.8]


def test_question_and_answer_repeat_the_sentence_of_the_document() -> None:
    passkey = document(count_words, 200, 1, 5, seed=11).passkeys[0]
    asked_and_told = question(passkey) + passkey.answer
    assert asked_and_told.endswith(passkey.needle.removesuffix(" Remember it."))
    assert asked_and_told.startswith(f"\nWhat is the passkey for {passkey.name}?")


def test_the_needle_template_names_its_slots() -> None:
    assert NEEDLE.format(name="Ada", words="otter drum") == "The passkey for Ada is otter drum. Remember it."


def test_no_word_stands_in_two_lists() -> None:
    lists = [value for value in vars(words).values() if isinstance(value, tuple)]
    everything = [word for word_list in lists for word in word_list]
    assert len(lists) == 9
    assert len(everything) == len(set(everything))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_tokens": 20, "num_passkeys": 2, "passkey_words": 8}, "more tokens are needed"),
        ({"num_tokens": 9000, "num_passkeys": 60, "passkey_words": 10}, r"num_passkeys \* passkey_words <="),
        ({"num_tokens": 9000, "num_passkeys": 161, "passkey_words": 1}, "at most 160 passkeys, got 161"),
        ({"num_tokens": 500, "num_passkeys": -1, "passkey_words": 1}, "num_passkeys >= 0"),
        ({"num_tokens": 500, "num_passkeys": 1, "passkey_words": 0}, "passkey_words >= 1"),
        ({"num_tokens": 500, "num_passkeys": 2, "passkey_words": 4, "depths": [0.5]}, "expected 2 depths"),
        ({"num_tokens": 500, "num_passkeys": 1, "passkey_words": 4, "depths": [1.5]}, r"depths in \[0, 1\]"),
    ],
)
def test_impossible_documents_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        document(count_words, seed=0, **arguments)

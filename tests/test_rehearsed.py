"""Documents with heavy hitters: what they mention where, and that they are the same everywhere."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.lab.tasks.passkeys import question
from hpu_duo.lab.tasks.rehearsed import Rehearsals, rehearsed_document


def words(text: str) -> int:
    return len(text.split())


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.2, 0.35]),
    st.integers(0, 9),
)
def test_each_passkey_is_told_once_and_asked_as_often_as_said(
    num_passkeys: int, passkey_words: int, num_rehearsals: int, tail: float, seed: int
) -> None:
    written = rehearsed_document(
        words, 1200, num_passkeys, passkey_words, seed, Rehearsals(num_rehearsals, tail)
    )
    assert 1200 - 20 < words(written.text) <= 1200
    for one in written.passkeys:
        assert written.text.count(one.needle) == 1
        assert written.text.count(question(one) + one.answer) == num_rehearsals
    last = max(written.text.rfind(word) for one in written.passkeys for word in one.words)
    assert words(written.text[last:]) >= tail * 1200 - 20


def test_passkeys_come_first_and_rehearsals_spread_over_the_middle() -> None:
    written = rehearsed_document(words, 2000, 3, 8, 1, Rehearsals(4))
    first = [words(written.text[: written.text.index(one.needle)]) for one in written.passkeys]
    assert max(first) < 0.12 * 2000
    places = [words(part) for part in written.text.split("\nWhat is")]
    assert len(places) == 13
    assert max(places[1:-1]) < 4 * min(places[1:-1])


def test_documents_are_functions_of_the_seed() -> None:
    texts = [rehearsed_document(words, 900, 2, 4, seed, Rehearsals(2)).text for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert hashlib.sha256(texts[0].encode()).hexdigest()[:16] == "7e64606ecf8285d9"


def test_a_document_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 rehearsals of each and a tail of 70 tokens: \d+ more"):
        rehearsed_document(words, 200, 3, 8, 0, Rehearsals(3))
    with pytest.raises(ValueError, match="rehearsals of 0 or more"):
        Rehearsals(-1)
    with pytest.raises(ValueError, match=r"a tail in \[0, 0.9\]"):
        Rehearsals(1, 1.0)

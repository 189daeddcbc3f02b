"""The documents: what they hide, what counts, and that they are the same everywhere."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.lab.identify import BuiltinHaystack, DatasetSettings, Encoder, Form, PasskeyDataset, TextHaystack

TOKENIZER = AutoTokenizer.from_pretrained(MODEL_DIR)
ENCODER = Encoder(TOKENIZER)
TEXT = "It rained all day. " * 5 + "Nobody came!\nThe river rose, and the bridge was closed. " * 3
SMALL = DatasetSettings(min_length=200, max_length=300, num_passkeys=3, passkey_words=4, form=Form.NAMES)


def decode(ids: Sequence[int] | np.ndarray) -> str:
    return str(TOKENIZER.decode([int(one) for one in ids]))


def make(chosen: DatasetSettings, text: str | None = None) -> PasskeyDataset:
    return PasskeyDataset(chosen, BuiltinHaystack() if text is None else TextHaystack(text), ENCODER)


def words_only(vocabulary: list[str]) -> Encoder:
    known = {token: index for index, token in enumerate(["<unk>", "a", *vocabulary])}
    model = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return Encoder(PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>"))


def test_documents_are_the_same_on_every_platform() -> None:
    """Digests of token ids and labels, as they were when the test was written."""
    digest = hashlib.sha256()
    for chosen, text in (
        (SMALL, None),
        (DatasetSettings(num_lengths=7, max_length=6000, min_length=3000), TEXT),
    ):
        for index in range(3):
            sample = make(chosen, text).sample(index)
            digest.update(" ".join(map(str, [*sample.ids, *sample.labelled])).encode())
    assert digest.hexdigest() == "c9e08a21da4b6112933d09551e9ae414782469f20daa9e7c19650fda50e61e96"


def test_a_document_is_a_function_of_its_number_alone() -> None:
    forwards, backwards = make(SMALL), make(SMALL)
    one = [forwards.sample(index).ids for index in range(4)]
    other = [backwards.sample(index).ids for index in reversed(range(4))]
    assert all(np.array_equal(a, b) for a, b in zip(one, reversed(other)))
    assert len({ids.tobytes() for ids in one}) == 4


def test_seeds_make_other_documents() -> None:
    other = DatasetSettings(**{**vars(SMALL), "seed": 1})
    assert not np.array_equal(make(SMALL).sample(0).ids[:50], make(other).sample(0).ids[:50])


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("text", [None, TEXT])
def test_every_passkey_is_hidden_once_and_asked_back_in_order(form: Form, text: str | None) -> None:
    chosen = DatasetSettings(min_length=700, max_length=900, num_passkeys=4, passkey_words=5, form=form)
    sample = make(chosen, text).sample(2)
    ids = sample.ids.tolist()
    first = int(sample.questions[0]) - len(ENCODER.encode(form.texts.question.format(label="Ada")))
    document, asked = decode(ids[:first]), decode(ids[first - 3 :])
    told = decode([ids[place] for place in sample.labelled])
    answers = [part.strip() for part in told.split(".")[:-1]]
    assert [len(answer.split()) for answer in answers] == [5] * 4
    places = [document.index(f"is {answer}.") for answer in answers]
    assert places == sorted(places)
    for answer in answers:
        assert document.count(answer) == 1
        assert asked.count(f"is {answer}.") == 1


def test_only_passkey_tokens_count_unless_questions_are_asked_for() -> None:
    plain, wide = (
        make(DatasetSettings(**{**vars(SMALL), "label_questions": flag})).sample(0) for flag in (False, True)
    )
    assert np.array_equal(plain.ids, wide.ids)
    assert set(plain.labelled) < set(wide.labelled)
    question = len(ENCODER.encode(Form.NAMES.texts.question.format(label="Ada")))
    assert len(wide.labelled) - len(plain.labelled) == 3 * question
    # Words and full stop of each answer; the end-of-text token behind it does not count.
    assert len(plain.labelled) == 3 * (4 + 1)
    assert TOKENIZER.eos_token_id not in plain.ids[wide.labelled]


@settings(max_examples=40, deadline=None)
@given(
    low=st.integers(150, 400),
    spread=st.integers(0, 300),
    num_lengths=st.integers(1, 5),
    passkeys=st.integers(1, 3),
    depths=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    index=st.integers(0, 10**6),
)
def test_documents_fill_one_of_the_lengths_and_keep_to_the_depths(
    low: int, spread: int, num_lengths: int, passkeys: int, depths: list[float], index: int
) -> None:
    chosen = DatasetSettings(
        min_length=low,
        max_length=low + spread,
        num_lengths=num_lengths,
        num_passkeys=passkeys,
        passkey_words=3,
        min_depth=depths[0],
        max_depth=depths[1],
        form=Form.NAMES,
    )
    sample = make(chosen).sample(index)
    question = len(ENCODER.encode(Form.NAMES.texts.question.format(label="Ada")))
    length = int(sample.questions[0]) - question
    wanted = np.linspace(low, low + spread, num_lengths).astype(int) if num_lengths > 1 else [low + spread]
    assert any(0 <= one - length < 20 for one in wanted)
    text = decode(sample.ids[:length])
    # A needle lies at the first sentence boundary from its depth on; sentences have up to 16 tokens.
    needle = len(ENCODER.encode(" The passkey for Ada is otter otter otter. Remember it."))
    filler = length - 1 - passkeys * needle
    before = len(ENCODER.encode(text[len("<bos>") : text.index("The passkey")].rstrip()))
    assert depths[0] * filler - 1 <= before <= depths[1] * filler + 17
    assert text.count("Remember it.") == passkeys


def test_a_haystack_file_is_read_from_a_random_sentence_on_and_goes_round(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    dataset = PasskeyDataset(SMALL, TextHaystack.read(path), ENCODER)
    text = decode(dataset.sample(0).ids)
    assert text.count("Nobody came!") >= 2
    assert (
        TextHaystack(TEXT).fingerprint == TextHaystack.read(path).fingerprint != TextHaystack("x").fingerprint
    )


def test_haystacks_that_hold_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for call, complaint in (
        (lambda: TextHaystack(" \n "), "with words in it"),
        (lambda: TextHaystack.read(tmp_path / "none"), "cannot read the haystack"),
        (lambda: TextHaystack.read(tmp_path / "bytes"), "expected UTF-8 text"),
    ):
        with pytest.raises(ValueError, match=complaint):
            call()


def test_a_tokenizer_that_does_not_know_the_words_is_refused() -> None:
    with pytest.raises(ValueError, match="can encode the passkeys, got none for 'bravo'"):
        PasskeyDataset(DatasetSettings(), BuiltinHaystack(), words_only(["alpha"]))


def test_a_tokenizer_that_gives_two_words_the_same_tokens_is_refused() -> None:
    encoder = words_only([])
    with pytest.raises(ValueError, match="tells passkeys apart, got the same tokens for 'a' and 'a'"):
        encoder.check_words(["a", "a"])


def test_text_without_passkeys_has_to_fit_the_model_and_the_haystack() -> None:
    make(SMALL).check_filler(500, 501)
    make(SMALL).check_filler(500, None)
    with pytest.raises(ValueError, match="a model of at least 501 positions, got one of 500"):
        make(SMALL).check_filler(500, 500)
    num_tokens = sum(len(ENCODER.encode(" " + piece)) for piece in TextHaystack(TEXT)._pieces)
    make(SMALL, TEXT).check_filler(num_tokens, None)
    with pytest.raises(
        ValueError, match=f"haystack of at least {num_tokens + 1} tokens, got one of {num_tokens}"
    ):
        make(SMALL, TEXT).check_filler(num_tokens + 1, None)


def test_a_haystack_without_tokens_is_refused() -> None:
    class Silent(Encoder):
        def encode(self, text: str) -> tuple[int, ...]:
            return () if text == " It rained all day." else super().encode(text)

    dataset = PasskeyDataset(SMALL, TextHaystack("It rained all day."), Silent(TOKENIZER))
    with pytest.raises(ValueError, match="can encode the haystack, got no tokens"):
        dataset.check(1, None)


def test_documents_longer_than_the_positions_are_found_before_the_run() -> None:
    dataset = make(SMALL)
    dataset.check(50, max_positions=400)
    with pytest.raises(
        ValueError,
        match=r"at most 330 tokens, the positions of the model, got one of .*what fits: --max-length",
    ):
        dataset.check(50, max_positions=330)


def test_what_a_refusal_advises_fits() -> None:
    with pytest.raises(ValueError, match="what fits: --max-length") as refused:
        make(DatasetSettings()).check(16, max_positions=512)
    words = str(refused.value).partition("what fits: ")[2].split()
    options = {name[2:].replace("-", "_"): int(value) for name, value in zip(words[::2], words[1::2])}
    make(DatasetSettings(**options)).check(16, max_positions=512)
    assert options["max_length"] > 200


def test_documents_too_short_for_their_passkeys_are_found_before_the_run() -> None:
    dataset = make(DatasetSettings(min_length=40, max_length=300, num_passkeys=3, passkey_words=8))
    with pytest.raises(ValueError, match="cannot hold 3 passkeys of 8 words: expected a length of at least"):
        dataset.check(50, max_positions=None)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"min_length": 10, "max_length": 5}, "min_length <= max_length, got 10 and 5"),
        ({"min_depth": 0.9, "max_depth": 0.1}, "min_depth <= max_depth"),
        ({"num_depths": 3}, "num_depths >= num_passkeys"),
        ({"num_passkeys": 21}, "at most 20 passkeys, got 21"),
        ({"num_passkeys": 0}, "at least one passkey"),
        ({"form": Form.NAMES, "passkey_words": 60}, "no word may occur twice"),
        ({"seed": -1}, "seed >= 0"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(fields: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        DatasetSettings(**fields)

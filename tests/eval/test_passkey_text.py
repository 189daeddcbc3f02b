"""Passkey documents for any tokenizer: their words, and the tokens where question and answer begin."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.lab.eval import PasskeyQuestions, PasskeyTask, PasskeyText, Subject, WordSource
from hpu_duo.lab.eval.passkey import whole_words
from hpu_duo.lab.tasks.haystack import BuiltinHaystack, TextHaystack
from hpu_duo.lab.tasks.passkeys import document, question, sentences
from hpu_duo.lab.tasks.words import NOUNS, PASSKEY_WORDS

Load = Callable[[float | None], Subject]
BOOK = "Rain fell on the harbour. Nobody watched the boats, and the lamps were out! A dog barked twice. " * 4


def lines(rng: random.Random) -> Iterator[str]:
    """Sentences that often end in a new line, so that a full stop and a new line become one token."""
    for sentence in sentences(rng):
        yield sentence + "\n"


def trained(pre_tokenizer: Any, decoder: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words and of what its pre-tokenizer lets grow together."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    texts = [document(len, 6000, 3, 4, seed=seed, filler=lines).text for seed in range(20)]
    words = " ".join(f"{word} {word}." for word in (*PASSKEY_WORDS, *NOUNS))
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *[words] * 3], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.fixture(scope="module", params=["like Llama 3", "like Llama 2", "built-in"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "built-in":
        return AutoTokenizer.from_pretrained(MODEL_DIR)
    if request.param == "like Llama 2":
        spaces = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
        return trained(spaces, decoders.Metaspace())
    # As GPT-4 has it: punctuation takes the new lines behind it along.
    split = pre_tokenizers.Split(Regex(r" ?[^\s\p{L}\p{N}]+[\r\n]*| ?\p{L}+| ?\p{N}+|\s+"), "isolated")
    return trained(
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        decoders.ByteLevel(),
    )


def test_words_of_a_tokenizer_are_single_tokens_that_the_text_does_not_have(tokenizer: Any) -> None:
    haystack = TextHaystack(BOOK + "An otter and a walrus.")
    words = PasskeyText(haystack, WordSource.TOKENIZER).words(tokenizer)
    assert len(words) > 150
    assert len(set(words)) == len(words)
    assert not {"otter", "walrus", "harbour", "passkey", "remember"} & set(words)
    assert "penguin" in words
    # What follows a word never changes its token, and the decoded token is the word.
    whole = tokenizer.encode("is " + " ".join(words[:50]) + ".", add_special_tokens=False)
    alone = tokenizer.encode("is", add_special_tokens=False)
    for word in words[:50]:
        (*_, last) = tokenizer.encode(f"is {word}", add_special_tokens=False)
        alone.append(last)
        assert tokenizer.decode([last]).strip() == word
    assert whole[: len(alone)] == alone


def test_the_builtin_words_stay_those_of_the_builtin_model(tokenizer: Any) -> None:
    assert PasskeyText().words(tokenizer) == PASSKEY_WORDS
    assert not set(PasskeyText(source=WordSource.TOKENIZER).words(tokenizer)) & BuiltinHaystack().words
    assert whole_words(tokenizer, frozenset({"penguin"})).count("penguin") == 0


@pytest.mark.parametrize("haystack", [BuiltinHaystack(), TextHaystack(BOOK)])
def test_question_and_answer_have_the_tokens_of_the_whole_text(
    builtin: Load, tokenizer: Any, haystack: Any
) -> None:
    subject = copy.copy(builtin(0.5))
    subject.tokenizer = tokenizer
    task = PasskeyTask(500, 2, 3, 4, text=PasskeyText(haystack, WordSource.TOKENIZER))
    written = PasskeyQuestions.write(subject, task)
    for at, one in enumerate(task.documents(subject)):
        alone = subject.encode(one.text, is_start=True)
        # Nothing of a question is prefilled.
        assert list(written.prompts[at]) == alone[: len(written.prompts[at])]
        assert len(alone) - len(written.prompts[at]) <= 1
        for passkey, tokens, length in zip(
            one.passkeys, written.continuations[at], written.answer_lengths[at]
        ):
            whole = subject.encode(one.text + question(passkey) + passkey.answer, is_start=True)
            assert [*written.prompts[at], *tokens] == whole
            assert tokenizer.decode(tokens[-length:]).strip() == passkey.answer.strip()
            # Each word is one token, and the full stop another.
            assert length == 5


def test_a_full_stop_that_joins_the_new_line_of_the_question_is_decoded_with_it(builtin: Load) -> None:
    subject = copy.copy(builtin(0.5))

    class Joining:
        unk_token_id = None

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text.replace(".\n", "|")]}

    subject.tokenizer = Joining()  # type: ignore[assignment]
    changed, added = subject.behind("The end.", "\nWhat")
    assert (changed, "".join(map(chr, added))) == (1, "|What")


def test_a_haystack_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"can encode 'Rain\.', got no tokens"):
        document(lambda text: 0 if "Rain" in text else 1, 20, 1, 1, 0, filler=lambda _: iter(["Rain."]))


def test_words_of_the_vocabulary_are_all_whole_words_and_not_only_the_frequent_ones(tokenizer: Any) -> None:
    few = whole_words(tokenizer, frozenset(), 20)
    every = PasskeyText(source=WordSource.VOCABULARY).words(tokenizer)
    assert len(few) == 20
    avoided = BuiltinHaystack().words
    assert [word for word in whole_words(tokenizer, frozenset(), None) if word not in avoided] == list(every)
    assert {word for word in few if word not in avoided} < set(every)
    with pytest.raises(ValueError, match="whole words among the model's tokens"):
        PasskeyText(source=WordSource.VOCABULARY).check(every, len(every) + 1)


def test_a_needle_lies_at_its_depth_in_tokens_of_the_whole_document(tokenizer: Any) -> None:
    """Pieces have other numbers of tokens in each tokenizer; a needle stands between two of them."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    longest = 60
    for depth in (0.0, 0.3, 0.7, 1.0):
        written = document(count, 1500, 1, 4, seed=5, depths=[depth], filler=TextHaystack(BOOK).pieces)
        (needle,) = written.passkeys
        before, _, after = written.text.partition(needle.needle)
        assert count(before) == pytest.approx(depth * (count(before) + count(after)), abs=longest)

"""Tokens have the bytes that they stand for, whatever kind of vocabulary they are from."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.server.answers.answer import CompletionLogprobs, TokenNames
from hpu_duo.server.planning import SamplingDefaults
from hpu_duo.server.prompts import TokenTexts

TEXT = "naïve € 😀 \n tab\t<eos>"


def byte_level() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def byte_fallback() -> PreTrainedTokenizerFast:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "n", "a", "▁"]
    made = Tokenizer(
        models.BPE(
            {piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_of_tokens_join_to_the_text(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    texts = TokenTexts(tokenizer)
    ids = tokenizer(TEXT)["input_ids"]
    assert bytes(byte for token in ids for byte in texts.bytes(token)).decode() == TEXT
    [first, *_] = tokenizer("€")["input_ids"]
    assert texts.text(first) == "bytes:\\xe2"
    assert texts.text(tokenizer("n")["input_ids"][0]) == "n"


def test_the_built_in_vocabulary_has_words_bytes_and_special_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    texts = TokenTexts(tokenizer)
    ids = tokenizer(f"The passkey for Joel is € {TEXT}", add_special_tokens=False)["input_ids"]
    assert (
        bytes(byte for token in ids for byte in texts.bytes(token)).decode()
        == f"The passkey for Joel is € {TEXT}"
    )
    assert texts.text(tokenizer.eos_token_id) == "<eos>"


@pytest.mark.parametrize("has_special", [False, True])
def test_offsets_are_places_in_the_text(has_special: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    ids = tokenizer("The passkey for Joël is 😀 €.")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    text = tokenizer.decode(ids, skip_special_tokens=not has_special)
    names = TokenNames(TokenTexts(tokenizer))
    found = CompletionLogprobs(names).fields(ids, has_special=has_special)
    places = list(zip(found["tokens"], found["text_offset"]))
    assert sum(token.startswith("bytes:") for token, _ in places) > 5
    for token, place in places[not has_special :]:
        assert token.startswith("bytes:") or text[place : place + len(token)] == token
    assert places[1][1] == (len("<bos>") if has_special else 0)
    assert places[-1] == (".", len(text) - 1)


def test_defaults_of_sampling_are_what_the_file_says(tmp_path: Path) -> None:
    assert SamplingDefaults.read(tmp_path) == SamplingDefaults()
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "do_sample": false}')
    assert SamplingDefaults.read(tmp_path) == SamplingDefaults(temperature=0.6, top_k=20)

"""Two small real tokenizers: byte-level BPE, and BPE with word-start marks and byte fallback."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Grüße aus Köln: 東京 und 日本語, naïve café, 5 € and 😀😀!",
    "def add(a, b):\n    return a + b\n\n\tstop here. Stop. The end.",
]
SPECIAL = ["<s>", "</s>", "<tool>"]


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return _wrap(tokenizer)


@pytest.fixture(scope="session")
def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """The layout of Llama 2: spaces are part of the tokens, the first one of a text is stripped."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=110, initial_alphabet=["▁"], show_progress=False)
    ascii_text = ["".join(c for c in line if c.isascii()) for line in TEXT]
    trained.train_from_iterator(ascii_text, trainer)
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    learned = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    for piece, _ in learned:
        vocab.setdefault(piece, len(vocab))
    merges = [m for m in _merges(trained) if "".join(m) in vocab]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(tokenizer)


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    return [(left, right) for left, right in pairs]

"""The built-in model's tokenizer: one token per word of its language, bytes for everything else."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from hpu_duo.lab.tasks import passkeys, words

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SPECIAL_TOKENS = (PAD, BOS, EOS)


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges whose vocabulary holds whole words.

    ``ignore_merges`` makes a pre-token that is in the vocabulary one token; any other is spelled in bytes, so
    every text survives a round trip. Ids: special tokens, the 256 bytes, then words in a fixed order.
    """
    vocab: dict[str, int] = {}
    for token in (*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *_words()):
        vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocab[BOS])]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and a ``tokenizer_config.json`` that transformers 4 and 5 both read."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _words() -> list[str]:
    """Word tokens: all with a leading space, and those that can open a text or a line without one too."""
    templates = " ".join((*passkeys.SENTENCES, passkeys.NEEDLE, passkeys.QUESTION)).split()
    literal = sorted({piece.rstrip(".?") for piece in templates if not piece.startswith("{")})
    openers = sorted({text.split()[0] for text in (*passkeys.SENTENCES, passkeys.NEEDLE, passkeys.QUESTION)})
    lists = (
        words.NAMES, words.PASSKEY_WORDS, words.ADJECTIVES, words.NOUNS, words.PEOPLE,
        words.VERBS, words.PLACES, words.TIMES, words.ADVERBS,
    )  # fmt: skip
    spaced = [*literal, *(word for word_list in lists for word in word_list)]
    # "Ġ" is how byte-level BPE writes a space.
    return [*openers, *(f"Ġ{word}" for word in spaced)]

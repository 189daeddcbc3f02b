"""Single tokens as texts and as bytes, as log-probabilities name them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from hpu_duo.sampling.detokenizer import REPLACEMENT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Texts and bytes of the tokens of one vocabulary.

    A token that is only a part of a character has no text: it is called by its bytes, ``bytes:\\xe2\\x82``.

    Args:
        tokenizer: of the checkpoint.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_tokens)
        self._special_ids = frozenset(tokenizer.all_special_ids)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_byte_level = backend is not None and "ByteLevel" in repr(backend.decoder)
        self.text = lru_cache(1 << 16)(self._text)
        self.bytes = lru_cache(1 << 16)(self._bytes)

    def num_characters(self, token_id: int, *, has_special: bool) -> int:
        """Characters of a text that begin with a token.

        Args:
            has_special: whether special tokens are a part of the text.
        """
        if not has_special and token_id in self._special_ids:
            return 0
        # Behind its first byte, a character's bytes in UTF-8 are 10xxxxxx.
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes(token_id))

    def _text(self, token_id: int) -> str:
        """The text of a token alone."""
        text = str(
            self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        if REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token_id))

    def _bytes(self, token_id: int) -> tuple[int, ...]:
        """The bytes that a token stands for."""
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if isinstance(name, str) and name not in self._special:
            if self._is_byte_level and all(character in _BYTE_OF for character in name):
                return tuple(_BYTE_OF[character] for character in name)
            if match := _BYTE.fullmatch(name):
                return (int(match[1], 16),)
        text = self._tokenizer.decode(
            [token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return tuple(str(text).encode())


def _byte_level_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes.

    Source: Radford et al. 2019 (GPT-2): printable bytes stand for themselves, the others, in order, for the
    characters from 256 on.
    """
    plain = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("\N{INVERTED EXCLAMATION MARK}"), 0xAD),
        *range(0xAE, 256),
    ]
    alphabet = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()

"""Token ids of texts, and what contexts in files have in common: their model, text and tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpu_duo.kv.row_state import RowState
from hpu_duo.kv.store import KVStore, UnitTensor, block_tensors
from hpu_duo.startup.fingerprint import KV_FORMAT, fingerprint
from kernels_ref import PLAIN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.generation import GenerativeModel


@dataclass(frozen=True)
class Document:
    """A text as token ids, and as it was written.

    Attributes:
        token_ids: one or more.
        text: None if token ids were passed.
        adds_special_tokens: whether the tokenizer adds its own to the text.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    adds_special_tokens: bool = True

    @classmethod
    def read(
        cls, document: Any, tokenizer: PreTrainedTokenizerBase | None, add_special_tokens: bool = True
    ) -> Document:
        """Read a text, or the token ids of one.

        Raises:
            ValueError: it is empty or neither of them, or a text and there is no tokenizer.
        """
        if not isinstance(document, str):
            return cls(_as_token_ids("the document", document))
        if not document:
            raise ValueError("expected text in the document, got none")
        ids = _need(tokenizer)(document, add_special_tokens=add_special_tokens)["input_ids"]
        return cls(tuple(ids), document, add_special_tokens)

    def followed_by(self, more: Any, num_kept: int, tokenizer: PreTrainedTokenizerBase | None) -> Document:
        """Return the text with a continuation.

        Token ids are appended. A continuation is tokenised together with this text, if that does not change
        the first ``num_kept`` tokens; otherwise, or if this text was passed as token ids, its own tokens are
        appended, without special ones.

        Args:
            num_kept: tokens that may not change.

        Raises:
            ValueError: see ``read``.
        """
        if not isinstance(more, str):
            return Document((*self.token_ids, *_as_token_ids("what follows a document", more)))
        if not more:
            raise ValueError("expected text after the document, got none")
        if self.text is not None:
            whole = Document.read(self.text + more, tokenizer, self.adds_special_tokens)
            if len(whole.token_ids) > num_kept and whole.token_ids[:num_kept] == self.token_ids[:num_kept]:
                return whole
        own = _need(tokenizer)(more, add_special_tokens=False)["input_ids"]
        text = None if self.text is None else self.text + more
        return Document((*self.token_ids, *own), text, self.adds_special_tokens)


def _need(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise ValueError("expected token ids, got text: this model was loaded without a tokenizer")
    return tokenizer


def _as_token_ids(name: str, given: Sequence[int]) -> tuple[int, ...]:
    try:
        tokens = np.asarray(given)
    except (TypeError, ValueError):
        tokens = np.zeros((0, 0), np.object_)
    if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{name}: expected one text, or the token ids of one, got {type(given).__name__} of shape "
            f"{list(tokens.shape)} and {tokens.dtype}; several documents are several calls"
        )
    return tuple(tokens.tolist())


_MOST_SHOWN = 60


def fingerprint_of(model: GenerativeModel) -> dict[str, str]:
    """Collect weights, heads, dtype and units of a model; see ``hpu_duo.startup.fingerprint``."""
    return fingerprint(model.engine, model.engine_config)


def check_fingerprint(path: Path, saved: object, model: GenerativeModel) -> None:
    """Raise ValueError, which names what differs, unless a saved context is of a model like this one."""
    got = fingerprint_of(model)
    if not isinstance(saved, dict):
        raise ValueError(f"{path}: expected the fingerprint of a model, got {type(saved).__name__}")
    # Files of version 1 do not say so.
    saved = {KV_FORMAT: PLAIN.name, **saved}
    for name in {**got, **saved}:
        if saved.get(name) != got.get(name):
            raise ValueError(
                f"{path}: expected a context of a model like this one, with {name} {_short(got.get(name))}, "
                f"got one with {_short(saved.get(name))}"
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 4] + " ..."


FORMAT = "hpu-duo context"
VERSIONS = ("1", "2", "3")
"""Those that are read. Files of version 1 have plain keys and values, and do not name a format."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}


def tensors_of(store: KVStore, num_blocks: int) -> dict[str, list[Any]]:
    """Return dtype and shape of the tensors of a context by name, in the order of the store.

    Raises:
        ValueError: a store has a dtype that files do not have.
    """
    if not num_blocks:
        return {}
    found = {
        each.name: [_dtype_name(each.flat.dtype), [num_blocks, *each.unit_shape]]
        for each in block_tensors(store)
    }
    for state in store.row_states:
        for name, tensor in state.saved.items():
            found[name] = [_dtype_name(tensor.dtype), [1, *tensor.shape]]
    return found


def _dtype_name(dtype: torch.dtype) -> str:
    if dtype not in _DTYPES:
        raise ValueError(f"expected stores in one of {', '.join(map(str, _DTYPES))}, got {dtype}")
    return _DTYPES[dtype]


def check_kind(path: Path, metadata: Mapping[str, Any], versions: Sequence[str]) -> None:
    """Raise ValueError unless a file says that it is a context, of one of some versions."""
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a context of hpu-duo, got another file of tensors")
    if metadata.get("version") not in versions:
        raise ValueError(
            f"{path}: expected version {', '.join(VERSIONS[:-1])} or {VERSIONS[-1]} of saved contexts, got "
            f"{metadata.get('version')}"
        )


def check_tensors(path: Path, found: Mapping[str, Any], model: GenerativeModel, num_blocks: int) -> None:
    """Raise ValueError, which names the first, if a file lacks tensors or has others than a model."""
    for name, expected in tensors_of(model.engine.runner.store, num_blocks).items():
        if name not in found:
            raise ValueError(f"{path}: expected a tensor {name}, found none")
        if (got := found[name]) != expected:
            raise ValueError(f"{path}: expected {name} to be {expected}, got {got}")


def chunk_of(tensors: Sequence[UnitTensor], chunk_bytes: int) -> int:
    """Return how many blocks are copied at a time."""
    return max(1, chunk_bytes // sum(each.unit_bytes for each in tensors))


@dataclass(frozen=True)
class SavedContext:
    """A context in a file, validated against a model; its keys and values are read lazily.

    Attributes:
        document: the text.
        cache_salt: its salt.
        num_blocks: blocks of the text.
        chunk_bytes: most bytes that are read at a time.
        read: returns the units of a tensor by its name, from one to another.
    """

    document: Document
    cache_salt: str | None
    num_blocks: int
    chunk_bytes: int
    read: Callable[[str, int, int], torch.Tensor]

    def chunks(
        self, tensors: Sequence[UnitTensor], first: int
    ) -> Iterator[tuple[UnitTensor, int, torch.Tensor]]:
        """Yield blocks of tensors from ``first`` on, a bounded number at a time, with the first of them."""
        size = chunk_of(tensors, self.chunk_bytes) if tensors else 1
        for begin in range(first, self.num_blocks, size):
            for each in tensors:
                yield each, begin, self.read(each.name, begin, min(begin + size, self.num_blocks))

    def row(self, state: RowState) -> dict[str, torch.Tensor]:
        """Return a row state."""
        return {name: self.read(name, 0, 1)[0] for name in state.saved}


def saved_context(
    path: Path,
    model: GenerativeModel,
    document: Document,
    salt: Any,
    read: Callable[[str, int, int], torch.Tensor],
) -> SavedContext:
    """Return a context of a file; raises ValueError for a salt that is none."""
    if not isinstance(salt, str | None):
        raise ValueError(f"{path}: expected cache_salt to be a text or null, got {salt!r}")
    contexts = model.engine.contexts
    num_blocks = len(document.token_ids) // contexts.block_size
    return SavedContext(document, salt, num_blocks, contexts.copies.chunk_bytes, read)

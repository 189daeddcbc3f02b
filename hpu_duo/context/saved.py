"""Token ids of texts, and contexts in files: safetensors with tokens and units of the stores."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from graphs.atomic_file import replacing
from hpu_duo.kv.row_state import RowState
from hpu_duo.kv.store import KVStore, UnitTensor, block_tensors
from hpu_duo.startup.fingerprint import KV_FORMAT, fingerprint
from kernels_ref import PLAIN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.generation import GenerativeModel
    from hpu_duo.request import PrefixHold


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


FORMAT, VERSION = "hpu-duo context", "2"
_VERSIONS = ("1", VERSION)
"""Those that are read. Files of version 1 have plain keys and values, and do not name a format."""
_TOKENS, _TEXT = "token_ids", "text"
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


def save_context(
    path: Path, model: GenerativeModel, document: Document, salt: str | None, hold: PrefixHold
) -> None:
    """Write a context, chunk by chunk, so that at any moment the file is whole.

    Raises:
        ValueError: the model's stores cannot be read, the context was lost meanwhile, or the file cannot be
            written.
    """
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": json.dumps(fingerprint_of(model)),
        "cache_salt": json.dumps(salt),
        "add_special_tokens": json.dumps(document.adds_special_tokens),
    }
    tokens = np.array(document.token_ids, "<i4")
    arrays = {_TOKENS: ("I32", [len(tokens)], [tokens.tobytes()])}
    if document.text is not None:
        text = document.text.encode()
        arrays[_TEXT] = ("U8", [len(text)], [text])
    store = model.engine.runner.store
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape, parts) in arrays.items():
        begin, end = end, end + sum(map(len, parts))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    for name, dtype, shape, num_bytes in _entries(store, hold.num_blocks):
        begin, end = end, end + num_bytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text_of_header = json.dumps(header).encode()
    text_of_header += b" " * (-len(text_of_header) % 8)
    copies = model.engine.contexts.copies
    try:
        with replacing(path) as file:
            file.write(struct.pack("<Q", len(text_of_header)) + text_of_header)
            for _, _, parts in arrays.values():
                file.writelines(parts)
            for each in block_tensors(store) if hold.num_blocks else ():
                for data in copies.read_blocks(hold, each, _chunk_of(each, copies.chunk_bytes)):
                    file.write(_bytes(data))
            for state in store.row_states if hold.num_blocks else ():
                file.writelines(map(_bytes, copies.read_row(hold, state).values()))
    except OSError as error:
        raise ValueError(f"cannot write the context to {path}: {error.strerror}") from error


def _entries(store: KVStore, num_blocks: int) -> Iterator[tuple[str, str, list[int], int]]:
    """Yield name, dtype, shape and bytes of the tensors of a context, in the order of its file."""
    if not num_blocks:
        return
    for each in block_tensors(store):
        shape = [num_blocks, *each.unit_shape]
        yield each.name, _dtype_name(each.flat.dtype), shape, num_blocks * each.unit_bytes
    for state in store.row_states:
        for name, tensor in state.saved.items():
            yield name, _dtype_name(tensor.dtype), [1, *tensor.shape], tensor.num_bytes


def _dtype_name(dtype: torch.dtype) -> str:
    if dtype not in _DTYPES:
        raise ValueError(f"expected stores in one of {', '.join(map(str, _DTYPES))}, got {dtype}")
    return _DTYPES[dtype]


def _bytes(data: torch.Tensor) -> bytes:
    return data.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _chunk_of(each: UnitTensor, chunk_bytes: int) -> int:
    """Number of units that are copied at a time."""
    return max(1, chunk_bytes // each.unit_bytes)


@dataclass(frozen=True)
class SavedContext:
    """A context in a file, validated against a model; its keys and values are read lazily.

    Attributes:
        path: of the file.
        document: the text.
        cache_salt: its salt.
        chunk_bytes: most bytes that are read at a time.
    """

    path: Path
    document: Document
    cache_salt: str | None
    chunk_bytes: int

    @classmethod
    def open(cls, path: Path, model: GenerativeModel) -> SavedContext:
        """Read all of a file but keys and values.

        Raises:
            ValueError: it cannot be read, is no context, is damaged, or is of a model that differs; the
                message names the difference.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError(f"{path}: expected a context of hpu-duo, got another file of tensors")
                if metadata.get("version") not in _VERSIONS:
                    raise ValueError(
                        f"{path}: expected version {' or '.join(_VERSIONS)} of saved contexts, got "
                        f"{metadata.get('version')}"
                    )
                check_fingerprint(path, _json(path, metadata, "fingerprint"), model)
                salt = _json(path, metadata, "cache_salt")
                if not isinstance(salt, str | None):
                    raise ValueError(f"{path}: expected cache_salt to be a text or null, got {salt!r}")
                names = set(file.keys())
                tokens = _array(path, file, names, _TOKENS, torch.int32).tolist()
                text = None
                if _TEXT in names:
                    text = bytes(_array(path, file, names, _TEXT, torch.uint8).tolist()).decode()
                adds = bool(_json(path, metadata, "add_special_tokens"))
                copied = model.engine.contexts.copies.chunk_bytes
                saved = cls(path, Document(tuple(tokens), text, adds), salt, copied)
                saved._check_shapes(file, names, model)
        except (SafetensorError, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the context {path}: {_reason(error)}") from error
        return saved

    def _check_shapes(self, file: Any, names: set[str], model: GenerativeModel) -> None:
        num_blocks = len(self.document.token_ids) // model.engine.contexts.block_size
        for name, dtype, shape, _ in _entries(model.engine.runner.store, num_blocks):
            if name not in names:
                raise ValueError(f"{self.path}: expected a tensor {name}, found none")
            found = file.get_slice(name)
            if (got := (found.get_dtype(), list(found.get_shape()))) != (expected := (dtype, shape)):
                raise ValueError(f"{self.path}: expected {name} to be {expected}, got {got}")

    def chunks(self, each: UnitTensor, first: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield blocks of a tensor, a bounded number at a time, with the number of the first of them.

        Args:
            first: block to begin with.

        Raises:
            ValueError: the file has changed or cannot be read.
        """
        try:
            with safe_open(self.path, framework="pt") as file:
                found, size = file.get_slice(each.name), _chunk_of(each, self.chunk_bytes)
                for begin in range(first, found.get_shape()[0], size):
                    data = found[begin : begin + size]
                    if data.shape[1:] != each.unit_shape or data.dtype != each.flat.dtype:
                        raise ValueError(f"{self.path}: {each.name} has changed since it was opened")
                    yield begin, data
        except (SafetensorError, OSError) as error:
            raise ValueError(f"cannot read the context {self.path}: {_reason(error)}") from error

    def row(self, state: RowState) -> dict[str, torch.Tensor]:
        """Return a row state.

        Raises:
            ValueError: the file has changed or cannot be read.
        """
        try:
            with safe_open(self.path, framework="pt") as file:
                found = {name: file.get_tensor(name)[0] for name in state.saved}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"cannot read the context {self.path}: {_reason(error)}") from error
        for name, tensor in state.saved.items():
            if (tuple(found[name].shape), found[name].dtype) != tensor:
                raise ValueError(f"{self.path}: {name} has changed since it was opened")
        return found


def is_context(path: Path) -> bool:
    """Whether a file begins like one of tensors, and so is no text."""
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError:
        return False
    return len(start) == 9 and start[8:] == b"{" and struct.unpack("<Q", start[:8])[0] < 1 << 27


def _json(path: Path, metadata: dict[str, str], name: str) -> Any:
    try:
        return json.loads(metadata[name])
    except (KeyError, ValueError):
        raise ValueError(f"{path}: expected {name} in the metadata, as JSON") from None


def _array(path: Path, file: Any, names: set[str], name: str, dtype: torch.dtype) -> torch.Tensor:
    if name not in names:
        raise ValueError(f"{path}: expected a tensor {name}, found none")
    array: torch.Tensor = file.get_tensor(name)
    if array.ndim != 1 or array.dtype != dtype or not math.prod(array.shape):
        raise ValueError(
            f"{path}: expected {name} to be a list of {dtype}, got {array.dtype} {[*array.shape]}"
        )
    return array


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)

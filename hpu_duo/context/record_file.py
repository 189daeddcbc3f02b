"""Contexts in files of records as the disk tier has them, the first one with the text and its model."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from graphs.atomic_file import replacing
from hpu_duo.context.saved import (
    FORMAT,
    VERSIONS,
    Document,
    SavedContext,
    check_fingerprint,
    check_kind,
    check_tensors,
    chunk_of,
    fingerprint_of,
    saved_context,
    tensors_of,
)
from hpu_duo.context.tensor_file import has_tensors, open_tensors
from hpu_duo.kv.prefix_tree import digests_of, root_digest
from hpu_duo.kv.row_state import SavedTensor
from hpu_duo.kv.store import KVStore, block_tensors
from hpu_duo.kv.tiers.host import RecordKey
from hpu_duo.kv.tiers.segments import (
    PAGE,
    RECORD_START,
    DamagedRecord,
    StoredRecord,
    file_start,
    has_records,
    parse_record,
    payload_of,
    read_start,
    write_record,
)
from hpu_duo.startup.fingerprint import records_digest

if TYPE_CHECKING:
    from hpu_duo.generation import GenerativeModel
    from hpu_duo.request import PrefixHold

_KIND = "context"
"""In headers of records instead of the name of a segment: files of contexts may be renamed."""
_NO_PARENT = bytes(32)


class _Unit(NamedTuple):
    """A record of a context but the first one."""

    key: RecordKey
    parent: bytes
    num_bytes: int


def _units(store: KVStore, digests: Sequence[bytes]) -> list[_Unit]:
    """Return the records of a context: its blocks, and a row with all states at its end.

    Args:
        digests: of its prefixes, see ``digests_of``.
    """
    block_bytes = sum(each.unit_bytes for each in block_tensors(store))
    row_bytes = sum(each.row_bytes for each in store.row_states)
    pairs = list(pairwise(digests))
    blocks = [_Unit(RecordKey(digest, False), parent, block_bytes) for parent, digest in pairs]
    rows = [_Unit(RecordKey(digest, True), parent, row_bytes) for parent, digest in pairs[-1:]]
    return (blocks if block_bytes else []) + (rows if row_bytes else [])


def save_context(
    path: Path, model: GenerativeModel, document: Document, salt: str | None, hold: PrefixHold
) -> None:
    """Write a context, chunk by chunk, so that at any moment the file is whole.

    Raises:
        ValueError: the model's stores cannot be read, the context was lost meanwhile, or the file cannot be
            written.
    """
    store, block_size = model.engine.runner.store, model.engine.contexts.block_size
    metadata = {
        "format": FORMAT,
        "version": VERSIONS[-1],
        "fingerprint": fingerprint_of(model),
        "cache_salt": salt,
        "add_special_tokens": document.adds_special_tokens,
        "token_ids": document.token_ids,
        "text": document.text,
        "tensors": tensors_of(store, hold.num_blocks),
    }
    digests = digests_of(root_digest(hold.namespace), hold.tokens, block_size)
    payloads = _payloads(model, hold)
    try:
        with replacing(path) as file:
            file.write(file_start(records_digest(model.engine, model.engine_config)))
            file.flush()
            first = RecordKey(digests[0], False)
            text = json.dumps(metadata).encode()
            stored = write_record(file.fileno(), _KIND, PAGE, first, _NO_PARENT, 0, [text])
            for unit, parts in zip(_units(store, digests), payloads):
                stored = write_record(
                    file.fileno(), _KIND, stored.end, unit.key, unit.parent, block_size, parts
                )
            file.truncate(stored.end)
    except OSError as error:
        raise ValueError(f"cannot write the context to {path}: {error.strerror}") from error


def _payloads(model: GenerativeModel, hold: PrefixHold) -> Iterator[Iterator[memoryview]]:
    """Yield the payloads of the records of a context but the first one, each in parts."""
    store, copies = model.engine.runner.store, model.engine.contexts.copies
    if tensors := tuple(block_tensors(store)):
        # At most as many bytes as one tensor of the document has, so that short ones need little memory.
        chunk = min(chunk_of(tensors, copies.chunk_bytes), -(-hold.num_blocks // len(tensors)))
        for data in copies.read_blocks(hold, tensors, chunk):
            for block in zip(*data):
                yield map(_bytes, block)
    yield (_bytes(data) for state in store.row_states for data in copies.read_row(hold, state).values())


def _bytes(data: torch.Tensor) -> memoryview:
    return data.contiguous().view(-1).view(torch.uint8).numpy().data


def is_context(path: Path) -> bool:
    """Whether a file begins like one of records or tensors, and so is no text."""
    start = _start_of(path)
    return has_records(start) or has_tensors(start)


def _start_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(9)
    except OSError:
        return b""


def open_context(path: Path, model: GenerativeModel) -> SavedContext:
    """Open a saved context of any version; of one in records all checksums are compared.

    Raises:
        ValueError: it cannot be read, is no context, is damaged, or is of a model that differs; the message
            names the difference.
    """
    return (_open_records if has_records(_start_of(path)) else open_tensors)(path, model)


def _open_records(path: Path, model: GenerativeModel) -> SavedContext:
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ValueError(f"cannot read the context {path}: {error.strerror}") from error
    if read_start(data[:PAGE]) is None:
        raise ValueError(f"{path}: expected the header of a file with records, got a damaged one")
    first, text = _record(path, data, 0, PAGE)
    metadata = _metadata(path, text)
    check_kind(path, metadata, VERSIONS[2:])
    check_fingerprint(path, metadata.get("fingerprint"), model)
    document, store = _document(path, metadata), model.engine.runner.store
    tokens = np.array(document.token_ids, np.int32)
    digests = digests_of(first.key.digest, tokens, model.engine.contexts.block_size)
    check_tensors(path, metadata.get("tensors", {}), model, len(digests) - 1)
    blocks, rows, offset = list[memoryview](), list[memoryview](), first.end
    for number, unit in enumerate(_units(store, digests), start=1):
        stored, payload = _record(path, data, number, offset, unit)
        (rows if unit.key.is_row else blocks).append(payload)
        offset = stored.end
    if len(data) != offset:
        raise ValueError(f"{path}: expected {offset:,} bytes in records, got {len(data):,}")
    of_blocks = {each.name: SavedTensor(each.unit_shape, each.flat.dtype) for each in block_tensors(store)}
    of_rows = {name: tensor for state in store.row_states for name, tensor in state.saved.items()}
    places = dict([*_places(of_blocks, blocks), *_places(of_rows, rows)])

    def read(name: str, begin: int, end: int) -> torch.Tensor:
        place, tensor, payloads = places[name]
        parts = [payload[place : place + tensor.num_bytes] for payload in payloads[begin:end]]
        data = torch.from_numpy(np.stack([np.frombuffer(part, np.uint8) for part in parts]))
        return data.view(tensor.dtype).view(-1, *tensor.shape)

    return saved_context(path, model, document, metadata.get("cache_salt"), read)


def _places(
    tensors: Mapping[str, SavedTensor], payloads: list[memoryview]
) -> Iterator[tuple[str, tuple[int, SavedTensor, list[memoryview]]]]:
    """Yield where each tensor begins in some payloads, by its name."""
    place = 0
    for name, tensor in tensors.items():
        yield name, (place, tensor, payloads)
        place += tensor.num_bytes


def _record(
    path: Path, data: memoryview, number: int, offset: int, expected: _Unit | None = None
) -> tuple[StoredRecord, memoryview]:
    """Return a record of a file and its payload, once header, key and checksum are those expected."""
    place = f"{path}: expected record {number} at {offset:,}"
    stored = parse_record(data[offset : offset + RECORD_START], _KIND, offset)
    if stored is None:
        is_short = len(data) < offset + RECORD_START
        raise ValueError(f"{place}, got {'the end of the file' if is_short else 'no header of one'}")
    if expected is not None and (got := _Unit(stored.key, stored.parent, stored.num_bytes)) != expected:
        raise ValueError(f"{place} to be {expected}, got {got}")
    try:
        return stored, payload_of(data[offset : stored.end], stored)
    except DamagedRecord as error:
        raise ValueError(f"{path}: record {number} at {offset:,} is damaged: {error}") from None


def _metadata(path: Path, text: memoryview) -> dict[str, Any]:
    try:
        found = json.loads(bytes(text))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("tensors", {}), dict):
        raise ValueError(f"{path}: expected JSON of a context in record 0, got other bytes")
    return found


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _document(path: Path, metadata: dict[str, Any]) -> Document:
    tokens, text = metadata.get("token_ids"), metadata.get("text")
    if not isinstance(tokens, list) or not tokens or not all(map(_is_token, tokens)):
        raise ValueError(f"{path}: expected token_ids to be a list of integers")
    if not isinstance(text, str | None):
        raise ValueError(f"{path}: expected text to be a text or null, got {type(text).__name__}")
    return Document(tuple(tokens), text, bool(metadata.get("add_special_tokens")))

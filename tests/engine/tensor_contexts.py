"""Writes contexts as version 2 did, and version 1 before it: files of tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from hpu_duo.context import PrefixContext
from hpu_duo.context.saved import fingerprint_of
from hpu_duo.kv.store import block_tensors


def save_tensors(context: PrefixContext, path: Path, version: str = "2") -> None:
    """Write a file of version 1 or 2; those of version 1 do not name a format."""
    model, hold = context._model, context.hold()
    store, copies = model.engine.runner.store, model.engine.contexts.copies
    tensors = {"token_ids": torch.tensor(context.token_ids, dtype=torch.int32)}
    if context.text is not None:
        tensors["text"] = torch.tensor(list(context.text.encode()), dtype=torch.uint8)
    for each in block_tensors(store):
        [[tensors[each.name]]] = copies.read_blocks(hold, [each], hold.num_blocks)
    for state in store.row_states:
        tensors |= {name: data[None] for name, data in copies.read_row(hold, state).items()}
    fingerprint = fingerprint_of(model)
    if version == "1":
        del fingerprint["kv_cache_dtype"]
    metadata = {
        "format": "hpu-duo context",
        "version": version,
        "fingerprint": json.dumps(fingerprint),
        "cache_salt": json.dumps(context.cache_salt),
        "add_special_tokens": "true",
    }
    save_file(tensors, path, metadata)

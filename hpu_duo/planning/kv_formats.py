"""Formats of keys and values as commands name them, for a model in bfloat16."""

from __future__ import annotations

from hpu_duo.planning.model import Format
from kernels_ref import PLAIN, KVFormat
from kernels_ref.formats import format_of


def parse_kv_format(text: str) -> KVFormat:
    """Return the format of a name; bf16, bfloat16 and auto are that of the model.

    Raises:
        ValueError: there is none; the message lists all names.
    """
    name = text.strip().lower()
    return PLAIN if name in (Format.BF16.value, "bfloat16") else format_of(name)


def name_of(kv_format: KVFormat) -> str:
    """Return the name of a format in reports."""
    return Format.BF16.value if kv_format.is_plain else kv_format.name

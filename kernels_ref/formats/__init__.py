"""Formats in which keys and values are stored, by name: one file for each family.

Names are those of vLLM where it has the format. Bytes may differ, see ``docs/quantisation.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from kernels_ref.formats.base import Floats, KVFormat, LeadingOfKeys, Rounded, VectorFormat, VectorPart
from kernels_ref.formats.fp8 import Fp8, ScaledFp8
from kernels_ref.formats.int4 import Int4
from kernels_ref.formats.int8 import Int8

__all__ = [
    "INC",
    "LATENT",
    "PAIR",
    "PLAIN",
    "ROUNDED",
    "KVFormat",
    "VectorFormat",
    "VectorPart",
    "format_of",
    "names_of_formats",
    "register_format",
]

PLAIN = KVFormat("auto", Floats(), Floats(), is_plain=True)
"""Keys and values in the model's dtype."""
LATENT = KVFormat("latent", Floats(), LeadingOfKeys(), is_plain=True)
"""Latents in the model's dtype, which are keys, and values by their leading elements."""
ROUNDED = {
    dtype: KVFormat(str(dtype).removeprefix("torch."), Rounded(dtype), Rounded(dtype))
    for dtype in (torch.bfloat16, torch.float16)
}
"""Keys and values of a model in another dtype in one of 16 bits, by that."""
PAIR = ":"
"""Between the names of a format of keys and of one of values."""

INC = "fp8_inc"
"""Keys and values in fp8 with the scales, and the range, of files of Intel Neural Compressor."""

_formats = {PLAIN.name: PLAIN}
_refused: Mapping[str, str] = {
    "fp8_e5m2": "two bits of a fraction are too few for keys",
    "kivi_": "scales of a channel over several tokens are not served yet",
    "nvfp4": "it is a format of NVIDIA's tensor cores",
    "turboquant_": "it rotates vectors, which no kernel here does",
    "fp8_ds_mla": "latent attention is not served",
    "nvfp4_ds_mla": "latent attention is not served",
}
"""Names, or their beginnings, that other software serves, and why this one does not."""


def register_format(added: KVFormat) -> None:
    """Add a format under its name.

    Raises:
        ValueError: another format has that name.
    """
    if _formats.setdefault(added.name, added) != added:
        raise ValueError(f"expected a name that no format of keys and values has, got {added.name!r}")


def within(kv_format: KVFormat, largest: float) -> KVFormat:
    """Return a format whose fp8 numbers are at most ``largest``, for devices whose fp8 ends below 448."""
    stored = (kv_format.keys, kv_format.values)
    keys, values = (replace(x, largest=largest) if isinstance(x, Fp8 | ScaledFp8) else x for x in stored)
    return replace(kv_format, keys=keys, values=values)


def names_of_formats() -> tuple[str, ...]:
    """Names of all formats but ``INC``, which needs files."""
    return tuple(_formats)


def format_of(name: str, setting: str = "kv_cache_dtype") -> KVFormat:
    """Return the format of that name, or of two names with ``PAIR`` between: of keys, and of values.

    Args:
        setting: that has the name, for messages.

    Raises:
        ValueError: there is none; the message lists all names.
    """
    if name in _formats:
        return _formats[name]
    if name == INC:
        return KVFormat(INC, Fp8(), Fp8())
    keys, is_pair, values = name.partition(PAIR)
    if is_pair and PAIR not in values:
        pair = KVFormat(name, format_of(keys, setting).keys, format_of(values, setting).values)
        # One name for the same bytes: saved contexts are compared by it.
        known = (x for x in _formats.values() if (x.keys, x.values) == (pair.keys, pair.values))
        return next(known, pair)
    served = f"{', '.join((*_formats, INC))}, or one of keys and one of values with {PAIR!r} between"
    begins = max((each for each in _refused if name.startswith(each)), key=len, default=None)
    reason = "" if begins is None else f": {_refused[begins]}"
    raise ValueError(f"expected {setting} to be one of {served}, got {name!r}{reason}")


for _format in (*ROUNDED.values(), KVFormat("float32", Rounded(torch.float32), Rounded(torch.float32))):
    register_format(_format)
register_format(KVFormat("int8_per_token_head", Int8(), Int8()))
register_format(KVFormat("int4_per_token_head", Int4(), Int4()))
register_format(KVFormat("fp8", Fp8(), Fp8()))
_formats["fp8_e4m3"] = _formats["fp8"]
register_format(KVFormat("fp8_per_token_head", ScaledFp8(), ScaledFp8()))
register_format(KVFormat("k8v4", Int8(), Int4()))

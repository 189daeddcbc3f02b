"""Writes of keys and values in place, for any compiler."""

from __future__ import annotations

import torch

from kernels_ref import index
from kernels_ref.units import KVUnits, NewKV


def _write(
    k_flat: torch.Tensor, v_flat: torch.Tensor, place: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    index.write(k_flat, place, k)
    index.write(v_flat, place, v)


_library = torch.library.Library("hpu_duo_kernels", "FRAGMENT")
_library.define("write_kv(Tensor(a!) k_flat, Tensor(b!) v_flat, Tensor place, Tensor k, Tensor v) -> ()")
_library.impl("write_kv", _write, "CPU")
torch.library.register_fake("hpu_duo_kernels::write_kv", lambda *_: None, lib=_library)


def write_as_operator(units: KVUnits, place: torch.Tensor, new: NewKV) -> None:
    """``kernels_ref.index.write_kv`` as an operator that says what it changes."""
    torch.ops.hpu_duo_kernels.write_kv.default(units.k_flat, units.v_flat, place, new.k, new.v)


# The compilers of torch 2.7 and 2.9 may copy a whole store that is written. That of 2.13 writes in place, and
# makes the write part of a loop that is there anyway.
write_kv = write_as_operator if torch.__version__ < "2.13" else index.write_kv

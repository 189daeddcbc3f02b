"""Writing keys and values where they stay, whichever compiler is around."""

from __future__ import annotations

import torch

from kernels_ref import index

_library = torch.library.Library("hpu_duo_kernels", "FRAGMENT")
_library.define(
    "write_kv(Tensor(a!) k_store, Tensor(b!) v_store, Tensor flat_index, Tensor k, Tensor v) -> ()"
)
_library.impl("write_kv", index.write_kv, "CPU")
torch.library.register_fake("hpu_duo_kernels::write_kv", lambda *_: None, lib=_library)

write_as_operator = torch.ops.hpu_duo_kernels.write_kv.default
"""``kernels_ref.index.write_kv`` as an operator that says what it changes."""

# The compilers of torch 2.7 and 2.9 copy a whole store that is written through a view of it. That of 2.13
# writes in place, and makes the write part of a loop that is there anyway.
write_kv = write_as_operator if torch.__version__ < "2.13" else index.write_kv

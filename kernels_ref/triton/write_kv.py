"""Write the keys and the values of new tokens to their slots, both in one launch.

Not fused with rotary embedding: transformers' own code applies that before it calls attention, in as many
ways as there are families, and a compiled layer already fuses it with what surrounds it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch


@triton.jit(do_not_specialize=["num_vectors"])
def write_kv_kernel(
    k_store_ptr: tl.tensor,
    v_store_ptr: tl.tensor,
    index_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    num_vectors: tl.tensor,
    stride_kq: tl.tensor,
    stride_kk: tl.tensor,
    stride_vq: tl.tensor,
    stride_vk: tl.tensor,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    VECTORS: tl.constexpr,
) -> None:
    """Grid ``(tiles of VECTORS vectors,)``; vector ``i`` is one of the ``NUM_HEADS`` heads of a token."""
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    inside = vector < num_vectors
    token, head = (vector // NUM_HEADS).to(tl.int64), vector % NUM_HEADS
    target = tl.load(index_ptr + vector, mask=inside, other=0).to(tl.int64)
    column = tl.arange(0, P)
    mask = inside[:, None] & (column < D)[None, :]
    place = target[:, None] * D + column[None, :]
    k = tl.load(k_ptr + (token * stride_kq + head * stride_kk)[:, None] + column[None, :], mask=mask)
    tl.store(k_store_ptr + place, k, mask=mask)
    v = tl.load(v_ptr + (token * stride_vq + head * stride_vk)[:, None] + column[None, :], mask=mask)
    tl.store(v_store_ptr + place, v, mask=mask)


def write_kv(
    k_flat: torch.Tensor,
    v_flat: torch.Tensor,
    place: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
) -> None:
    """Launch the kernel; see ``kernels_ref.triton.parts.write_kv``."""
    num_tokens, num_heads, dim = k_QKD.shape
    vectors = launch.MERGED_LINES
    write_kv_kernel[(launch.num_tiles(num_tokens * num_heads, vectors),)](
        k_flat,
        v_flat,
        place,
        k_QKD,
        v_QKD,
        num_tokens * num_heads,
        *k_QKD.stride()[:2],
        *v_QKD.stride()[:2],
        NUM_HEADS=num_heads,
        D=dim,
        P=launch.padded_dim(dim),
        VECTORS=vectors,
        **launch.MERGE.options,
    )

"""The attention of other packages, each as a function without arguments, or the reason why it is missing."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Work = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Dense:
    """One request's dense attention, in the form of other packages.

    Attributes:
        q: ``[1, H, Q, D]``, scaled already.
        k, v: ``[1, K, T, D]``; the last query is the last key's.
        causal: query ``i`` sees keys up to ``T - Q + i``; otherwise all.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool

    def __post_init__(self) -> None:
        if self.causal and self.q.shape[2] != self.k.shape[2]:
            raise ValueError(
                f"expected as many queries as keys for causal attention, "
                f"got {self.q.shape[2]} and {self.k.shape[2]}"
            )


def rivals(dense: Dense) -> dict[str, Work | str]:
    """Every implementation by name: a call that returns ``[1, H, Q, D]``, or why there is none."""
    on_gpu = dense.q.device.type == "cuda"
    return {
        "SDPA flash": partial(_sdpa, dense, SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": partial(_sdpa, dense, SDPBackend.CUDNN_ATTENTION) if on_gpu else "cuDNN needs CUDA",
        "FlexAttention": _flex(dense),
        "flash-attn": _flash_attn(dense) if on_gpu else "flash-attn needs CUDA",
        "FlashInfer": _flashinfer(dense) if on_gpu else "FlashInfer needs CUDA",
    }


def _sdpa(dense: Dense, backend: SDPBackend) -> torch.Tensor:
    group = dense.q.shape[1] // dense.k.shape[1]
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            dense.q, dense.k, dense.v, is_causal=dense.causal, scale=1.0, enable_gqa=group > 1
        )


def _flex(dense: Dense) -> Work | str:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    on_gpu = dense.q.device.type == "cuda"
    queries, keys = dense.q.shape[2], dense.k.shape[2]
    group = dense.q.shape[1] // dense.k.shape[1]
    mask = None
    if dense.causal:
        mask = create_block_mask(_is_before, None, None, queries, keys, device=dense.q.device)
    run = torch.compile(flex_attention, dynamic=False) if on_gpu else flex_attention
    if not on_gpu:
        # A C++ compiler would have to build it: the plain form does to show that the call is right.
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    return partial(
        run,
        dense.q,
        dense.k,
        dense.v,
        block_mask=mask,
        scale=1.0,
        enable_gqa=group > 1,
    )


def _is_before(
    batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    return query >= key


def _imported(name: str) -> ModuleType | str:
    """A package, or why it cannot be used: one built for another torch fails in its import."""
    if importlib.util.find_spec(name) is None:
        return f"{name} is not installed"
    try:
        return import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        return f"{name} cannot be imported: {next(iter(str(error).splitlines()), type(error).__name__)}"


def _flash_attn(dense: Dense) -> Work | str:
    module = _imported("flash_attn")
    if isinstance(module, str):
        return module
    q, k, v = (x.transpose(1, 2).contiguous() for x in (dense.q, dense.k, dense.v))
    if dense.q.shape[2] == 1:
        decode = partial(module.flash_attn_with_kvcache, q, k, v, softmax_scale=1.0)
        return lambda: decode().transpose(1, 2)
    prefill = partial(module.flash_attn_func, q, k, v, softmax_scale=1.0, causal=dense.causal)
    return lambda: prefill().transpose(1, 2)


def _flashinfer(dense: Dense) -> Work | str:
    module = _imported("flashinfer")
    if isinstance(module, str):
        return module
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (dense.q, dense.k, dense.v))
    if dense.q.shape[2] == 1:
        decode = partial(module.single_decode_with_kv_cache, q[0], k, v, sm_scale=1.0)
        return lambda: decode()[None, :, None]
    prefill = partial(module.single_prefill_with_kv_cache, q, k, v, causal=dense.causal, sm_scale=1.0)
    return lambda: prefill().transpose(0, 1)[None]

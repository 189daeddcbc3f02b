"""The vendor's fused operators with the numbers of a CPU: ``torch.ops.hpu``.

Schemas and semantics are those of public sources: the PyTorch bridge (``sdpa_gen.cpp``, ``softmax_fa2.cpp``,
``block_softmax_adjustment.cpp``, ``FusedRMSNorm.py``, ``RotaryPosEmbeddingHelper.py``, and their tests) and
their callers in vllm-gaudi. What a kernel leaves undefined is NaN here, and what we never call is left out.

Shapes: B, K, G batch, key/value heads and query heads of each, S queries, T keys, D head size; X blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

PACKED = 8
"""Numbers that a Gaudi 3 keeps in each cache line of a row of maxima or sums."""

LINE_BYTES = 256

FAST_INVERSE = 128.0
"""By which the inverse sum is too small in fast mode, as callers in vLLM's fork for HPU correct it."""

_names = ["GAUDI3"]
_libraries: list[torch.library.Library] = []


def device_name() -> str:
    """The kind of device that is simulated: "GAUDI2" or "GAUDI3"."""
    return _names[-1]


@contextmanager
def named(name: str) -> Iterator[None]:
    """Simulate another kind of device inside the context.

    Shapes of results differ between kinds. The tag keeps them apart in torch's cache of compiled code.
    """
    _names.append(name)
    tag = f"{torch.compiler.config.cache_key_tag}hpu-sim-{name}"
    try:
        with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            yield
    finally:
        _names.pop()


def register() -> None:
    """Make the operators known to this process, once."""
    if _libraries:
        return
    library = torch.library.Library("hpu", "DEF")
    for schema, function, shapes in _OPERATORS:
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"hpu::{name}", shapes, lib=library)
    _libraries.append(library)


def _is_aligned() -> bool:
    return device_name() == "GAUDI3"


def _line(dtype: torch.dtype) -> int:
    """Numbers that fit into a cache line."""
    return LINE_BYTES // dtype.itemsize


# Attention


def _sdpa_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    requires_backward, softmax_mode = rest[4], rest[5]
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    out = q.new_empty(*torch.broadcast_shapes(batch, v.shape[:-2]), q.shape[-2], v.shape[-1])
    stats = (*batch, q.shape[-2], 1) if requires_backward else (1,)
    is_narrow = softmax_mode == "fast" and q.dtype == torch.bfloat16
    inverse = q.new_empty(stats, dtype=torch.bfloat16 if is_narrow else torch.float32)
    return out, q.new_empty(stats), inverse, q.new_empty(1, dtype=torch.int32)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    p: float,
    scale: float,
    is_causal: bool,
    requires_backward: bool,
    softmax_mode: str,
    valid_seq_len: torch.Tensor | None,
    seq_padding_type: str,
) -> tuple[torch.Tensor, ...]:
    """Attention ``[B, (K, G,) S, D]``, normalised, with the largest score and the inverse sum of each query.

    K and V may have one query head in place of G; the mask is added to the scores.
    """
    if p or is_causal or valid_seq_len is not None or not requires_backward:
        raise NotImplementedError("simulated are calls without dropout, with a mask, that return statistics")
    if attention_mask is not None and attention_mask.dtype != q.dtype:
        raise ValueError(f"expected a mask of {q.dtype}, got {attention_mask.dtype}")
    scores = (torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale).to(q.dtype)
    if attention_mask is not None:
        scores = scores + attention_mask
    largest = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores.float() - largest.float())
    is_fast = softmax_mode == "fast"
    if is_fast and q.dtype == torch.bfloat16:
        weights = weights.to(q.dtype).float()
    inverse = 1 / weights.sum(dim=-1, keepdim=True)
    out = (torch.matmul(weights.to(q.dtype).float(), v.float()) * inverse).to(q.dtype)
    if is_fast and q.dtype == torch.bfloat16:
        inverse = (inverse / FAST_INVERSE).to(q.dtype)
    return out, largest, inverse, torch.zeros(1, dtype=torch.int32)


# Softmax


def _softmax_shapes(
    input: torch.Tensor,
    *,
    inputM: torch.Tensor,
    inputL: torch.Tensor,
    dim: int = -1,
    descale: torch.Tensor | None = None,
    experimental_mode: bool = False,
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(input), *(torch.empty_like(x) for x in (inputM, inputL, inputL))


def _softmax(
    input: torch.Tensor,
    *,
    inputM: torch.Tensor,
    inputL: torch.Tensor,
    dim: int = -1,
    descale: torch.Tensor | None = None,
    experimental_mode: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Weights of ``[..., n, T]`` and the running maxima and sums, which go on from those that are given.

    On a Gaudi 3, these have eight numbers in a cache line, given as well as returned.
    """
    if dim not in (-1, input.dim() - 1) or descale is not None or experimental_mode:
        raise NotImplementedError("simulated are calls over the last dimension of unscaled numbers")
    rows = input.shape[:-1]
    largest = torch.maximum(_unpacked(inputM, rows), input.amax(dim=-1))
    weights = torch.exp(input - largest[..., None])
    fix = torch.exp(_unpacked(inputM, rows) - largest)
    total = fix * _unpacked(inputL, rows) + weights.sum(dim=-1)
    return weights, *(_packed(x) for x in (largest, total, fix))


def _packed_rows(rows: torch.Size, dtype: torch.dtype) -> tuple[int, ...]:
    return (*rows[:-1], math.ceil(rows[-1] / PACKED) * _line(dtype))


def _unpacked(x: torch.Tensor, rows: torch.Size) -> torch.Tensor:
    wanted = _packed_rows(rows, x.dtype) if _is_aligned() else tuple(rows)
    if tuple(x.shape) != wanted:
        raise ValueError(
            f"expected maxima and sums of shape {wanted} on {device_name()}, got {tuple(x.shape)}"
        )
    if not _is_aligned():
        return x
    return x.unflatten(-1, (-1, _line(x.dtype)))[..., :PACKED].flatten(-2)[..., : rows[-1]]


def _packed(x: torch.Tensor) -> torch.Tensor:
    if not _is_aligned():
        return x
    lines = x.new_full(_packed_rows(x.shape, x.dtype), torch.nan).unflatten(-1, (-1, _line(x.dtype)))
    spare = lines.shape[-2] * PACKED - x.shape[-1]
    lines[..., :PACKED] = torch.nn.functional.pad(x, (0, spare), value=torch.nan).unflatten(-1, (-1, PACKED))
    return lines.flatten(-2)


# Softmax of blocks


def _blocks_shapes(
    attn: torch.Tensor, block_bias: torch.Tensor, block_indicators: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    num_blocks, size = attn.shape[0], attn[0, ..., 0].numel()
    if _is_aligned():
        size = math.ceil(size / _line(attn.dtype)) * _line(attn.dtype)
    return torch.empty_like(attn), attn.new_empty(num_blocks, size), attn.new_empty(num_blocks, size)


def _blocks(
    attn: torch.Tensor, block_bias: torch.Tensor, block_indicators: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Weights of scores ``[X, K, G, S, T]``, and maxima and sums ``[X, K * G * S]``, of each block by itself.

    Blocks with indicator -1 get weights of zero, and nothing else that may be read.
    """
    num_blocks, *heads, num_queries, num_keys = attn.shape
    if tuple(block_bias.shape) != (num_blocks, 1, 1, num_queries, num_keys) or len(heads) != 2:
        raise ValueError(f"expected scores of 5 dimensions and a bias of each block, got {block_bias.shape}")
    if block_indicators.shape != (num_blocks,):
        raise ValueError(f"expected {num_blocks} indicators, got {tuple(block_indicators.shape)}")
    is_active = (block_indicators != -1)[:, None, None, None, None]
    scores = attn + block_bias
    largest = scores.amax(dim=-1, keepdim=True)
    weights = torch.where(is_active, torch.exp(scores - largest), 0.0)
    made = _blocks_shapes(attn, block_bias, block_indicators)
    for whole, part in zip(made[1:], (largest, weights.sum(dim=-1, keepdim=True))):
        part = torch.where(is_active, part, torch.nan).view(num_blocks, -1)
        whole.fill_(torch.nan)[:, : part.shape[1]] = part
    return weights, *made[1:]


# Norms and rotary embeddings


def _norm_shapes(data_in: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, ...]:
    dtype = data_in.dtype if data_in.dtype == gamma.dtype else torch.float32
    return (
        data_in.new_empty(data_in.shape, dtype=dtype),
        data_in.new_empty((*data_in.shape[:-1], 1), dtype=dtype),
    )


def _norm(data_in: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, ...]:
    """Divide by the root of the mean square, and multiply by ``gamma``."""
    inverse = torch.rsqrt(data_in.float().square().mean(dim=-1, keepdim=True) + epsilon)
    dtype = _norm_shapes(data_in, gamma, epsilon)[0].dtype
    return (data_in.float() * inverse * gamma.float()).to(dtype), inverse.to(dtype)


def _rotary_shapes(input: torch.Tensor, *_: Any) -> torch.Tensor:
    return input.new_empty(input.shape)


def _rotary(
    input: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    position_ids: torch.Tensor | None,
    offset: int,
    mode: int,
) -> torch.Tensor:
    """Turn pairs of numbers that are half a head apart."""
    if position_ids is not None or offset or mode:
        raise NotImplementedError("simulated are calls blockwise with a sine and a cosine of each token")
    x, half = input.float(), input.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos.float() + turned * sin.float()).to(input.dtype)


# Codes


def _fp8_max() -> float:
    return 240.0 if device_name() == "GAUDI2" else 448.0


def _widened_shapes(
    input: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], 8 * input.shape[-1], dtype=out_dtype)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words[..., None] >> shifts) & 15).flatten(-2)


def _widened(
    input: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """Codes ``[K, N / 8]`` of 4 bits in int32 words, with scales ``[G, N]`` of groups of inputs."""
    codes = _nibbles(input).float()
    repeats = codes.shape[0] // scale.shape[0]
    if zero_point is not None:
        codes = codes - _nibbles(zero_point).float().repeat_interleave(repeats, 0)
    return (codes * scale.float().repeat_interleave(repeats, 0)).to(out_dtype)


def _rounded_shapes(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    stochastic_rounding: bool = False,
    is_amax: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_shape: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return input.new_empty(input.shape, dtype=dtype), input.new_empty((), dtype=torch.float32)


def _rounded(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    stochastic_rounding: bool = False,
    is_amax: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_shape: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply with the scale, and round to the fp8 numbers of the device."""
    if stochastic_rounding or is_amax or scale_shape is not None:
        raise NotImplementedError("simulated are calls that round to the nearest, and return no maxima")
    scaled = input.float() if scale is None else input.float() * scale
    return scaled.clamp(-_fp8_max(), _fp8_max()).to(dtype), torch.zeros(())


def _product_shapes(
    A: torch.Tensor, trans_A: bool, B: torch.Tensor, trans_B: bool, D: Any, out_dtype: torch.dtype, *_: Any
) -> torch.Tensor:
    rows, columns = A.shape[1 if trans_A else 0], B.shape[0 if trans_B else 1]
    return A.new_empty(rows, columns, dtype=out_dtype)


def _product(
    A: torch.Tensor,
    trans_A: bool,
    B: torch.Tensor,
    trans_B: bool,
    D: torch.Tensor | None,
    out_dtype: torch.dtype,
    A_scale_inv: torch.Tensor | None = None,
    B_scale_inv: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    B_scale_shape: list[int] | None = None,
) -> torch.Tensor:
    """Product of fp8 matrices, multiplied with the scales of rows and columns."""
    if D is not None or accumulate or B_scale_shape is not None:
        raise ValueError(
            "expected no D, accumulate or B_scale_shape for fp8_gemm_v2, with which no layer calls it, got "
            f"D={D is not None}, accumulate={accumulate}, B_scale_shape={B_scale_shape}"
        )
    for codes in (A, B):
        if bool((codes.float().abs() > _fp8_max()).any()):
            raise ValueError(f"expected fp8 numbers up to {_fp8_max():g}, got larger ones")
    left, right = A.float(), B.float()
    y = torch.matmul(left.t() if trans_A else left, right.t() if trans_B else right)
    for scale in (A_scale_inv, B_scale_inv):
        y = y if scale is None else y * scale.float()
    return (y if bias is None else y + bias.float()).to(out_dtype)


_OPERATORS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    (
        "sdpa_recomp_fwd(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale, "
        "bool is_causal, bool requires_backward, str softmax_mode, Tensor? valid_seq_len, "
        "str seq_padding_type) -> (Tensor, Tensor, Tensor, Tensor)",
        _sdpa,
        _sdpa_shapes,
    ),
    (
        "softmax_fa2(Tensor input, *, Tensor inputM, Tensor inputL, int dim=-1, Tensor? descale=None, "
        "bool experimental_mode=False) -> (Tensor, Tensor, Tensor, Tensor)",
        _softmax,
        _softmax_shapes,
    ),
    (
        "block_softmax(Tensor attn, Tensor block_bias, Tensor block_indicators) -> (Tensor, Tensor, Tensor)",
        _blocks,
        _blocks_shapes,
    ),
    ("rms_norm(Tensor data_in, Tensor gamma, float epsilon) -> (Tensor, Tensor)", _norm, _norm_shapes),
    (
        "rotary_pos_embedding(Tensor input, Tensor sin, Tensor cos, Tensor? position_ids, int offset, "
        "int mode) -> Tensor",
        _rotary,
        _rotary_shapes,
    ),
    (
        "convert_from_uint4(Tensor input, Tensor scale, Tensor? zero_point, ScalarType out_dtype) -> Tensor",
        _widened,
        _widened_shapes,
    ),
    (
        "cast_to_fp8_v2(Tensor input, Tensor? scale=None, bool stochastic_rounding=False, "
        "bool is_amax=False, ScalarType dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)",
        _rounded,
        _rounded_shapes,
    ),
    (
        "fp8_gemm_v2(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype, "
        "Tensor? A_scale_inv=None, Tensor? B_scale_inv=None, Tensor? bias=None, bool accumulate=False, "
        "int[]? B_scale_shape=None) -> Tensor",
        _product,
        _product_shapes,
    ),
)

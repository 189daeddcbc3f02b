"""Trial of fused operators on their device, against results on the host.

Their sources are not public, results differ between devices and versions, and an available operator may not
support a type or a size. So each is called once, at odd sizes, before anything depends on it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from bias_builders import Leading
from kernels_ref.hpu import attention as fused_softmax
from kernels_ref.hpu.attention import (
    ATTENTION,
    BLOCK_SOFTMAX,
    SOFTMAX,
    FusedOperators,
    attend_dense,
    attend_rows,
    exists,
)
from kernels_ref.partial import FLOOR, Partial, Softmax, attend, empty
from kernels_ref.reference import merge_by_owner
from kernels_ref.step import SlotMasks

_log = logging.getLogger(__name__)

_ROW_ATTENTION = f"{ATTENTION} of rows"

_INVERSE_SCALES = (1.0, 128.0)
"""Factors that inverse sums are known to lack: vLLM's fork for HPU multiplies those of fast mode by 128."""

_EXACT_ERROR = 1e-4
_NARROW_ERROR = 4 * torch.finfo(torch.bfloat16).eps
"""Of means of values up to 4: weights and results are each rounded by up to half an epsilon."""

_FAST_ERROR = 0.1
"""Fast exponentials use a lookup table: the bridge names their mode after 8-bit numbers."""


class Trial(NamedTuple):
    """Findings of a trial.

    Attributes:
        operators: those that may be called.
        problems: why the others may not be called.
    """

    operators: FusedOperators
    problems: tuple[str, ...]

    @classmethod
    def of_all(cls, trials: Sequence[Trial]) -> Trial:
        """Combine trials of several sizes."""
        first = trials[0].operators
        scales = {trial.operators.inverse_scale for trial in trials if trial.operators.attention}
        together = first._replace(
            attention=all(trial.operators.attention for trial in trials) and len(scales) == 1,
            softmax=all(trial.operators.softmax for trial in trials),
            block_softmax=all(trial.operators.block_softmax for trial in trials),
            row_attention=all(trial.operators.row_attention for trial in trials),
        )
        problems = dict.fromkeys(problem for trial in trials for problem in trial.problems)
        return cls(together, tuple(problems))


class _Refusal(Exception):
    """An operator returns a wrong result."""


@torch.inference_mode()
def try_operators(
    device: torch.device,
    dtype: torch.dtype,
    group_size: int,
    head_dim: int,
    softmax: Softmax,
    line_bytes: int,
    value_dim: int | None = None,
) -> Trial:
    """Call each fused operator once, and check its results.

    Args:
        dtype: of queries, keys and values.
        group_size, head_dim: of the layers of the model.
        line_bytes: see ``FusedOperators``; by the kind of device.
        value_dim: elements of a value; None = ``head_dim``.
    """
    found: dict[str, float] = {}
    problems = []
    sizes = _Sizes(device, dtype, group_size, head_dim, value_dim or head_dim)
    scores_dtype = dtype if softmax is Softmax.FAST and dtype == torch.bfloat16 else torch.float32
    tries: dict[str, Callable[[], float]] = {
        ATTENTION: lambda: _try_attention(sizes, softmax),
        SOFTMAX: lambda: _try_softmax(sizes, scores_dtype, line_bytes),
        BLOCK_SOFTMAX: lambda: _try_block_softmax(sizes, scores_dtype),
        _ROW_ATTENTION: lambda: _try_row_attention(sizes, softmax),
    }
    for name, run in tries.items():
        if name == _ROW_ATTENTION and ATTENTION not in found:
            continue
        try:
            if not exists(name.partition(" ")[0]):
                raise _Refusal("it does not exist here")
            found[name] = run()
        except (_Refusal, RuntimeError, ValueError, TypeError) as error:
            problems.append(f"{name}: {error}")
    operators = FusedOperators(
        ATTENTION in found,
        SOFTMAX in found,
        BLOCK_SOFTMAX in found,
        line_bytes,
        found.get(ATTENTION, 1.0),
        _ROW_ATTENTION in found,
    )
    _log.info(
        "fused operators %s; %s", ", ".join(operators.names) or "none", "; ".join(problems) or "all pass"
    )
    return Trial(operators, tuple(problems))


class _Sizes(NamedTuple):
    """Odd sizes, and the device."""

    device: torch.device
    dtype: torch.dtype
    group_size: int
    head_dim: int
    value_dim: int
    num_kv: int = 2

    def random(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return numbers.to(self.dtype if dtype is None else dtype)


def _try_attention(sizes: _Sizes, softmax: Softmax) -> float:
    """Return the scale of the inverse sum; scores are as peaked as those of a trained model."""
    num_queries, num_keys = 37, 83
    q = sizes.random(num_queries, sizes.num_kv, sizes.group_size, sizes.head_dim, seed=0)
    q = q * (4 / math.sqrt(sizes.head_dim))
    dims = sizes.head_dim, sizes.value_dim
    k, v = (sizes.random(num_keys, sizes.num_kv, dim, seed=seed) for seed, dim in enumerate(dims, 1))
    visible = torch.rand(num_queries, num_keys, generator=torch.Generator().manual_seed(3)) < 0.5
    visible[0], visible[1], visible[1, 5] = False, False, True
    on = sizes.device
    got = attend_dense(q.to(on), k.to(on), v.to(on), visible.to(on), softmax, 1.0)
    got = Partial(*(x.cpu() for x in got))
    if (got.attn[0] != 0).any() or (got.max[0] != FLOOR).any() or (got.sum[0] != 0).any():
        raise _Refusal("a query that sees no key cannot be distinguished from others")
    scores = torch.einsum("qkgd,tkd->qkgt", q.double(), k.double())
    allowed = _allowed(sizes.dtype, softmax)
    errors = []
    for given in _roundings(scores, sizes.dtype):
        hidden = given.masked_fill(~visible[:, None, None], -math.inf)[1:]
        attn = torch.einsum("qkgt,tkd->qkgd", hidden.softmax(dim=-1), v.double())
        offset = got.max[1:].double() - hidden.logsumexp(dim=-1)
        scale = min(_INVERSE_SCALES, key=lambda each: abs(offset.median().item() - math.log(each)))
        errors.append((max(_largest(got.attn[1:] - attn), _largest(offset - math.log(scale))), scale))
    error, scale = min(errors)
    if error > allowed:
        raise _Refusal(f"its results are off by {error:.2g}, expected at most {allowed:.2g}")
    return scale


def _try_row_attention(sizes: _Sizes, softmax: Softmax) -> float:
    """Unused slots contain NaNs, and rows see from one slot to all of them."""
    num_rows, num_slots = 5, 29
    q = sizes.random(num_rows, sizes.num_kv, sizes.group_size, sizes.head_dim, seed=10)
    q = q * (4 / math.sqrt(sizes.head_dim))
    shape, dims = (num_rows, sizes.num_kv, num_slots), (sizes.head_dim, sizes.value_dim)
    k, v = (sizes.random(*shape, dim, seed=seed) for seed, dim in enumerate(dims, 11))
    seen = Leading(torch.tensor([1, 7, 16, 28, 29], dtype=torch.int32)[:, None, None])
    masks = SlotMasks.of(seen, num_slots, sizes.dtype)
    on = sizes.device
    stored_k, stored_v = (x.masked_fill(masks.unused, math.nan).to(on) for x in (k, v))
    there = SlotMasks(*(x.to(on) for x in masks if x is not None))
    got = attend_rows(q.to(on), stored_k, stored_v, there, softmax).cpu().double()
    errors = []
    for given in _roundings(torch.matmul(q.double(), k.double().transpose(2, 3)), sizes.dtype):
        weights = given.masked_fill(~masks.visible, -math.inf).softmax(dim=-1)
        errors.append(_largest(got - torch.matmul(weights, v.double())))
    error, allowed = min(errors), _allowed(sizes.dtype, softmax)
    if not error <= allowed:
        raise _Refusal(f"its results are off by {error:.2g}, expected at most {allowed:.2g}")
    return 1.0


def _try_softmax(sizes: _Sizes, dtype: torch.dtype, line_bytes: int) -> float:
    shape = (5, sizes.num_kv, sizes.group_size + 9, 29)
    scores = sizes.random(*shape, seed=4, dtype=dtype) * 4
    values = sizes.random(5, sizes.num_kv, 29, sizes.value_dim, seed=5)
    visible = torch.rand(5, 1, 1, 29, generator=torch.Generator().manual_seed(6)) < 0.7
    visible[2] = False
    on = sizes.device
    got = fused_softmax.attend(scores.to(on), visible.to(on), values.to(on), line_bytes)
    _check(got, attend(scores, visible, values), _allowed_beside(sizes.dtype, dtype))
    return 1.0


def _try_block_softmax(sizes: _Sizes, dtype: torch.dtype) -> float:
    """Blocks without an owner, which contain NaNs, are included."""
    owner = torch.tensor([2, 0, 3, 2, 0, 3, 2], dtype=torch.int32)
    heads, block_size = sizes.group_size, 32
    scores = sizes.random(len(owner), sizes.num_kv, heads, block_size, seed=7, dtype=dtype) * 4
    values = sizes.random(len(owner), sizes.num_kv, block_size, sizes.value_dim, seed=8)
    scores[owner == 3] = values[owner == 3] = torch.nan
    before = empty(sizes.random(3, sizes.num_kv, heads, sizes.value_dim, seed=9))
    total = Partial(*(x.to(sizes.device) for x in before))
    args = [x.to(sizes.device) for x in (scores, values, owner)]
    got = fused_softmax.merge_by_owner(total, *args)
    expected = merge_by_owner(before, scores, values, owner)
    _check(got, expected, _allowed_beside(sizes.dtype, dtype))
    return 1.0


def _roundings(scores: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores as a kernel may have them: exact, or rounded to the type of its operands."""
    return scores, scores.to(dtype).double()


def _allowed(dtype: torch.dtype, softmax: Softmax) -> float:
    if dtype == torch.float32:
        return _EXACT_ERROR
    return _FAST_ERROR if softmax is Softmax.FAST else _NARROW_ERROR


def _allowed_beside(*dtypes: torch.dtype) -> float:
    return _EXACT_ERROR if set(dtypes) == {torch.float32} else _NARROW_ERROR


def _check(got: Partial, expected: Partial, allowed: float) -> None:
    """Compare means and log-sum-exps, which determine partials.

    Raises:
        _Refusal: they differ by more than is allowed.
    """
    attn, largest, total = (x.cpu().double() for x in got)
    if ((total > 0) != (expected.sum > 0)).any() or (attn[expected.sum == 0] != 0).any():
        raise _Refusal("rows that see no key cannot be distinguished from others")
    seen = expected.sum > 0
    error = max(
        _largest(attn[seen] / total[seen][:, None] - expected.attn[seen] / expected.sum[seen][:, None]),
        _largest(largest[seen] + total[seen].log() - expected.max[seen] - expected.sum[seen].log()),
    )
    if not error <= allowed:
        raise _Refusal(f"its results are off by {error:.2g}, expected at most {allowed:.2g}")


def _largest(difference: torch.Tensor) -> float:
    found = float(difference.abs().max())
    return found if found == found else math.inf

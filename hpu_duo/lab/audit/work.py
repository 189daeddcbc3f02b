"""Operations and bytes of one operator call, read from the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpu_duo.lab.rules import Engine

_READS_BY_INDEX = frozenset({"index_select", "gather", "embedding", "index"})
"""Operators that read as much of their first operand as they return."""

_WRITES_SOURCE = frozenset({"index_copy_", "copy_"})
"""Operators that write as much of their first operand as the last one holds, and read nothing of it."""

_ATTENTION = "hpu.sdpa_recomp_fwd"
"""Two products in one operator, of queries with keys and of weights with values."""

_OVERWRITES = frozenset({"fill_", "zero_"})


@dataclass(frozen=True)
class OperatorWork:
    """Work of one engine of a device; ``hpu_duo.planning.Work`` is that of all of them.

    Attributes:
        num_launches: operator calls; fusion makes fewer kernels of them.
        num_operations: for the matrix engine two for each product that is summed; for the vector engine one
            for each element of the largest tensor, whatever is computed with it; 0 for moving data.
        num_bytes: read and written, each operand and result once, as if nothing were fused.
        num_scores: attention scores that an operator makes and keeps to itself.
    """

    num_launches: int = 0
    num_operations: int = 0
    num_bytes: int = 0
    num_scores: int = 0

    def __add__(self, other: OperatorWork) -> OperatorWork:
        return OperatorWork(
            self.num_launches + other.num_launches,
            self.num_operations + other.num_operations,
            self.num_bytes + other.num_bytes,
            self.num_scores + other.num_scores,
        )


def operator_work(
    name: str, engine: Engine, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> OperatorWork:
    """The work of one call.

    Args:
        name: of the operator, without namespace and overload.
        operands: tensors among the arguments, in order.
        results: tensors that it returns; those that it changed in place are operands too.
    """
    written = sum(map(moved_bytes, results))
    if name in _READS_BY_INDEX:
        read = written + sum(map(moved_bytes, operands[1:]))
    elif name in _WRITES_SOURCE:
        read = sum(map(moved_bytes, operands[1:]))
        written = moved_bytes(operands[-1])
    elif name in _OVERWRITES:
        read = 0
    else:
        read = sum(map(moved_bytes, operands))
    num_scores = _num_scores(operands, results) if name == _ATTENTION else 0
    return OperatorWork(1, _num_operations(name, engine, operands, results), read + written, num_scores)


def moved_bytes(tensor: torch.Tensor) -> int:
    """Bytes that reading or writing a tensor once takes: an expanded one has fewer than elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _num_scores(operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> int:
    num_keys, value_dim = operands[2].shape[-2:]
    return results[0].numel() // value_dim * num_keys


def _num_operations(
    name: str, engine: Engine, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> int:
    if name == _ATTENTION:
        return 2 * _num_scores(operands, results) * (operands[1].shape[-1] + operands[2].shape[-1])
    if engine is Engine.MATRIX:
        # The product's last operand is [..., k, n], in all but convolutions, where it is [out, k, ...].
        inner = operands[1][0].numel() if "convolution" in name else operands[-1].shape[-2]
        return 2 * results[0].numel() * inner
    if engine is Engine.VECTOR:
        return max((tensor.numel() for tensor in (*operands, *results)), default=0)
    return 0

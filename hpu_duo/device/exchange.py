"""Exchanges of tensors between ranks inside a step, by torch's functional operators, which compile.

Torch has no public names for the operators themselves; those used here are all in this file.
"""

from __future__ import annotations

import torch
import torch.distributed

assert torch.distributed.is_available(), "its import defines the operators"
_OPERATORS = torch.ops._c10d_functional


def sum_over_ranks(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of a tensor over all ranks, of the same shape, on each of them.

    Args:
        group: name of the ranks' process group.
    """
    return _OPERATORS.wait_tensor(_OPERATORS.all_reduce(tensor.contiguous(), "sum", group))


def send_to_ranks(tensor: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """Send entry ``r`` of a tensor ``[num_ranks, ...]`` to rank ``r``; returns what all sent here, alike."""
    one_each = [1] * num_ranks
    sent = _OPERATORS.all_to_all_single(tensor.contiguous(), one_each, one_each, group)
    return _OPERATORS.wait_tensor(sent)


def gather_from_ranks(tensor: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """Return the tensors ``[A, ...]`` of all ranks one after the other, ``[num_ranks * A, ...]``."""
    gathered = _OPERATORS.all_gather_into_tensor(tensor.contiguous(), num_ranks, group)
    return _OPERATORS.wait_tensor(gathered)

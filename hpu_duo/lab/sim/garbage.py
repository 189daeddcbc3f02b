"""Results of operators that are not launched: tensors of the right shape that hold garbage."""

from __future__ import annotations

from typing import Any

import torch

from hpu_duo.lab.rules import Operator


def with_any_index(operator: Operator, args: list[Any]) -> list[Any]:
    """Return the arguments with indices that are in range, to compute the shape of the result only."""
    args = list(args)
    if operator.index is not None:
        args[operator.index[0]] = torch.zeros_like(args[operator.index[0]])
    if operator.takes_index_list:
        args[1] = [None if index is None else torch.zeros_like(index) for index in args[1]]
    return args


def spoil(result: Any, kept: set[int]) -> None:
    """Fill new tensors with garbage, as in memory that is not written; ``kept`` storages are not new."""
    if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in kept:
        result.fill_(float("nan") if result.is_floating_point() else 0)
    elif isinstance(result, list | tuple):
        for each in result:
            spoil(each, kept)

"""Reading one element per row with int32 indices."""

from __future__ import annotations

import torch
from torch import Tensor


def take_column(matrix_NK: Tensor, column_N: Tensor) -> Tensor:
    """``matrix[i, column[i]]`` for every row i.

    By a flat index, because ``torch.gather`` insists on int64.

    Args:
        matrix_NK: [N, K], with N * K < 2**31.
        column_N: int32 [N], each in [0, K).
    """
    num_rows, width = matrix_NK.shape
    starts_N = torch.arange(num_rows, dtype=torch.int32, device=matrix_NK.device) * width
    return matrix_NK.reshape(-1).index_select(0, starts_N + column_N)

"""Tokens chosen on the host, for rows that ask for more than the device's sampler has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hpu_duo.sampling.rng import uniform, wrap_seed

if TYPE_CHECKING:
    from torch import Tensor

    from hpu_duo.sampling.rows import SamplingRow


def choose_on_host(
    host_sampled: Mapping[int, SamplingRow], logits_NV: Tensor
) -> tuple[dict[int, int], dict[int, Exception]]:
    """Return the host's choices, and the errors of rows without one, by index of the row.

    Args:
        host_sampled: rows with ``SamplingRow.choose``, by index.
        logits_NV: float [N, V] on the host.
    """
    vocab_size = logits_NV.shape[1]
    chosen, errors = dict[int, int](), dict[int, Exception]()
    for index, row in host_sampled.items():
        assert row.choose is not None, "only rows with a host sampler are host_sampled"
        draw = uniform(np.array([wrap_seed(row.seed)], np.uint64), np.array([row.num_output_tokens]))
        try:
            token = row.choose(logits_NV[index], float(draw[0]))
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"expected a host sampler to choose a token in [0, {vocab_size}), got {token}"
                )
            chosen[index] = token
        except Exception as error:
            errors[index] = error
    return chosen, errors

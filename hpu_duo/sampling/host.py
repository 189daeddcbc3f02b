"""Tokens chosen on the host, for rows that ask for more than the device's sampler has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hpu_duo.sampling.rng import uniform, wrap_seed

if TYPE_CHECKING:
    from hpu_duo.sampling.batch import SamplingRow

HostChoice = Callable[[Tensor, float], int]
"""From the logits of one row, ``[V]``, and a uniform number in (0, 1) to a token id."""


class HostSampler(Protocol):
    """Chooses the tokens of one sample, and may end it; made by ``SamplingParams.host_sampler``.

    Slow: the logits come to the host in every step, and rows are handled one after the other. A step that
    failed asks again for a token that was chosen already.
    """

    @property
    def chooses(self) -> bool:
        """Whether ``choose`` is asked for tokens; otherwise the device samples them as usual."""
        ...

    def choose(self, output_ids: npt.NDArray[np.int32], logits: Tensor, uniform: float) -> int:
        """Return the next token.

        Args:
            output_ids: the tokens sampled so far, int32 ``[num_output_tokens]``; a view.
            logits: as the model gave them, ``[V]``, on the host; not to be modified.
            uniform: in (0, 1), the draw that the request's seed gives this token.
        """
        ...

    def ends(self, output_ids: npt.NDArray[np.int32]) -> bool:
        """Whether the sample ends with the last of its tokens; asked after each one."""
        ...


def hosted_rows(rows: Sequence[SamplingRow | None]) -> list[int]:
    """Return the indices of the rows whose tokens are chosen on the host."""
    return [index for index, row in enumerate(rows) if row is not None and row.choose is not None]


def without(rows: Sequence[SamplingRow | None], hosted: Sequence[int]) -> Sequence[SamplingRow | None]:
    """Return the rows as the device sees them: those of the host ask for nothing there."""
    if not hosted:
        return rows
    return [None if index in hosted else row for index, row in enumerate(rows)]


def choose_on_host(
    rows: Sequence[SamplingRow | None], hosted: Sequence[int], logits_NV: Tensor, token_ids: Tensor
) -> dict[int, Exception]:
    """Put the host's choices in place of the device's; return what was raised, by index of the row.

    Args:
        hosted: ``hosted_rows(rows)``, not empty.
        logits_NV: float [N, V] on the device. All rows are copied, so that the shape is that of the step.
        token_ids: int32 [N] on the host; changed in place.
    """
    on_host_NV = logits_NV.cpu()
    errors: dict[int, Exception] = {}
    for index in hosted:
        row = rows[index]
        assert row is not None
        assert row.choose is not None
        draw = uniform(np.array([wrap_seed(row.seed)], np.uint64), np.array([row.num_output_tokens]))
        try:
            token = row.choose(on_host_NV[index], float(draw[0]))
            if not 0 <= token < on_host_NV.shape[1]:
                raise ValueError(
                    f"expected a host sampler to choose a token in [0, {on_host_NV.shape[1]}), got {token}"
                )
            token_ids[index] = token
        except Exception as error:
            errors[index] = error
    return errors

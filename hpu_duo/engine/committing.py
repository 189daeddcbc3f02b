"""Appends the sampled tokens of a step to their requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpu_duo.engine.step_plan import CommittedToken, StepPlan
from hpu_duo.request import RequestStatus
from hpu_duo.scheduling import SchedulingPolicy


def append_tokens(
    plan: StepPlan,
    token_ids: Sequence[int] | NDArray[np.integer],
    num_accepted: Sequence[int],
    policy: SchedulingPolicy,
) -> list[CommittedToken]:
    """Update the requests of a step: count computed tokens, append sampled ones. Skips those not running.

    Args:
        token_ids: ``num_samples`` for each row of ``plan.sampled_rows``, row after row.
        num_accepted: number of accepted tokens of each of these rows.
        policy: notified of the tokens that each request was served.
    """
    accepted = iter(num_accepted)
    committed = []
    sample = 0
    for row in plan.rows:
        request, first, num_samples = row.request, sample, row.num_samples
        sample += num_samples
        num_taken = next(accepted) if num_samples else 0
        if request.status is not RequestStatus.RUNNING:
            continue
        num_appended = 0
        for place in range(first, first + num_taken):
            token, number = int(token_ids[place]), request.num_output_tokens
            reason = request.append(token)
            committed.append(CommittedToken(request, token, reason, number, place))
            num_appended += 1
            if reason is not None:
                break
        # Tokens after the one that ends a request are no output: neither cached nor charged.
        request.num_computed_tokens = row.end - (num_samples - num_appended)
        policy.charge(request, row.num_new_tokens, num_appended)
    return committed

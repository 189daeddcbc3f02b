"""Exchanges of tensors between ranks inside a step, and checks of them before anything runs on several."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed

from hpu_duo.device.ranks import Membership, RankError, Ranks

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


_NUM_VALUES = 251
"""A prime, so that no two chunks of a ring are alike."""
_MOST = 255
"""Integers up to here are exact in every type, and so are sums of all ranks that stay below."""


class ExchangeTrial(NamedTuple):
    """One exchange, and the values that a rank has to get.

    Attributes:
        what: name of the exchange.
        run: exchanges; returns the values ``[count]`` on any device.
        expected: ``[count]`` on the host.
    """

    what: str
    run: Callable[[], torch.Tensor]
    expected: torch.Tensor

    def fault(self) -> str | None:
        """Run the exchanges, and describe wrong values; None if nothing.

        Raises:
            RuntimeError: the exchange failed, or a rank did not participate in time; the message names it.
        """
        try:
            got = self.run()
        except RuntimeError as error:
            raise RuntimeError(f"{self.what} failed: {error}") from error
        return fault_of(self.what, got, self.expected)


def fault_of(what: str, got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Compare received values with the expected ones, both ``[count]``; returns what is wrong, or None."""
    host = got.cpu()
    wrong = host != expected
    if not wrong.any():
        return None
    first = int(wrong.nonzero()[0])
    return (
        f"{what} left {int(wrong.sum())} of {len(host)} values wrong: "
        f"expected {float(expected[first])} at {first}, got {float(host[first])}"
    )


def check_exchanges(
    membership: Membership, device: torch.device, dtype: torch.dtype, *, sends_to_each: bool
) -> None:
    """Check all exchanges of an engine with a few kilobytes; called by all ranks.

    Args:
        device: of this rank's steps.
        dtype: of the model; some exchanges are in float32 whatever it is.
        sends_to_each: whether steps exchange all to all.

    Raises:
        RankError: a value was wrong on some rank, the same error on all; it names rank and exchange.
        RuntimeError: see ``ExchangeTrial.fault``.
    """
    ranks = membership.ranks
    trials = [_message_trial(membership)]
    for each in dict.fromkeys((dtype, torch.float32)):
        trials += step_trials(ranks, membership.group, device, each, sends_to_each=sends_to_each)
    # A rank that stopped at its first fault would leave the others in the middle of the next exchange.
    faults = [fault for trial in trials if (fault := trial.fault()) is not None]
    for rank, found in enumerate(membership.collect(faults)):
        if found:
            raise RankError(
                f"expected ranks to exchange data correctly, got a fault on rank {rank}: {found[0]} "
                f"(hpu-duo doctor --collectives {ranks.size} tries exchanges alone)"
            )


def step_trials(
    ranks: Ranks, group: str, device: torch.device, dtype: torch.dtype, *, sends_to_each: bool = True
) -> list[ExchangeTrial]:
    """Return the exchanges inside steps, in one type.

    Args:
        group: name of the ranks' process group.
        device: of this rank.
        sends_to_each: whether steps exchange all to all.
    """
    rank, size = ranks.rank, ranks.size
    parts = [_exchanged_values(each, dtype) for each in range(size)]
    partial_sums = [_exchanged_values(each, dtype, _MOST // size) for each in range(size)]
    # Rank r sends rank q the values of number r * size + q.
    sent = torch.stack([_exchanged_values(rank * size + each, dtype) for each in range(size)]).to(device)
    due = torch.cat([_exchanged_values(each * size + rank, dtype) for each in range(size)])
    own, partial_sum = parts[rank].to(device), partial_sums[rank].to(device)
    total = torch.stack(partial_sums).sum(dim=0).to(dtype)
    suffix = f"in {str(dtype).removeprefix('torch.')}"
    trials = [
        ExchangeTrial(f"all_reduce {suffix}", lambda: sum_over_ranks(partial_sum, group), total),
        ExchangeTrial(f"all_gather {suffix}", lambda: gather_from_ranks(own, size, group), torch.cat(parts)),
    ]
    if sends_to_each:
        trials.append(
            ExchangeTrial(f"all_to_all {suffix}", lambda: send_to_ranks(sent, size, group).flatten(), due)
        )
    return trials


def _message_trial(membership: Membership) -> ExchangeTrial:
    expected = _exchanged_values(0, torch.uint8)
    own = expected.clone() if membership.ranks.rank == 0 else torch.zeros_like(expected)
    return ExchangeTrial("broadcast of rank 0", lambda: membership.link.spread(own), expected)


def _exchanged_values(number: int, dtype: torch.dtype, most: int = _MOST) -> torch.Tensor:
    """Integers ``[251]`` from 0 to ``most`` on the host, others for each number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(most + 1, (_NUM_VALUES,), generator=generator).to(dtype)

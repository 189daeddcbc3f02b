"""Search of the policy with the highest predicted throughput: a linear programme for each size of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil, floor
from typing import Any

import numpy as np

from hpu_duo.extras import install_command
from hpu_duo.planning.offload.formula import (
    BLOCK_SIZE,
    Form,
    Formula,
    OffloadMachine,
    OffloadModel,
    OffloadWork,
    Placement,
    Policy,
)
from hpu_duo.planning.offload.zigzag import ZigZag

_GIB = 1 << 30
_NUM_SIMULATED = 12
_NUM_ROUNDED = 4
_MEMORIES = {"device": "device_memory", "host": "host_memory", "disk": "disk"}


@dataclass(frozen=True)
class Found:
    """A policy and what it is predicted to reach.

    Attributes:
        policy: with shares of whole layers and blocks.
        tokens_per_s: output tokens, by the simulated schedule.
        bound: tokens per second of the linear programme, whose shares need not be whole.
        binds: what decodes wait for most: a link, the disk or compute.
        full: memories that the programme fills.
        peak_bytes: of each memory.
    """

    policy: Policy
    tokens_per_s: float
    bound: float
    binds: str
    full: tuple[str, ...]
    peak_bytes: dict[str, float]


class PolicySearch:
    """The search on one machine.

    Args:
        host_attention: whether decodes attend on the host to what lies there; None = whichever is faster.
        max_batch: most rows of a batch.
        is_served: find only what an engine executes in groups of rows: keys and values, and activations, on
            the device.

    Raises:
        ValueError: scipy is not installed.
    """

    def __init__(
        self,
        model: OffloadModel,
        work: OffloadWork,
        machine: OffloadMachine,
        host_attention: bool | None = None,
        max_batch: int = 1024,
        *,
        is_served: bool = False,
    ) -> None:
        self.model, self.work, self.machine = model, work, machine
        self._ways = (False, True) if host_attention is None else (host_attention,)
        self._max_batch, self._is_served = max_batch, is_served
        self._solve = _solver()
        self._solved = lru_cache(maxsize=None)(self._place)

    def bounds(self) -> list[tuple[float, Policy]]:
        """Return the highest tokens per second of each size of batches, with parts of layers and blocks."""
        tried = [self._best_number(size, way) for way in self._ways for size in self._sizes(way)]
        return sorted(((bound, one) for bound, one in tried if one is not None), reverse=True)

    def bound(self, batch_size: int, num_batches: int, host_attention: bool) -> float:
        """Return the highest tokens per second of one size of batches; 0 if it does not fit."""
        placed = self._solved(batch_size, num_batches, host_attention)
        formula = self._formula(batch_size, num_batches, host_attention)
        return formula.throughput(placed[0]) if placed else 0.0

    def whole(self, batch_size: int, num_batches: int, host_attention: bool) -> Found | None:
        """Return the best policy of one size of batches, with shares of whole parts; None if none fits."""
        placed = self._solved(batch_size, num_batches, host_attention)
        bound = self.bound(batch_size, num_batches, host_attention)
        return self._whole(self._formula(batch_size, num_batches, host_attention), placed, bound)

    def best(self) -> Found:
        """Return the fastest policy.

        Raises:
            ValueError: one row at a time does not fit.
        """
        best = [policy for _, policy in self.bounds()[:_NUM_ROUNDED]]
        sizes = dict.fromkeys(size for policy in best for size in self._rounded(policy))
        found = [self.whole(*size) for size in sizes]
        whole = [each for each in found if each is not None]
        if not whole:
            raise ValueError(
                f"expected memories that hold the model and one request of "
                f"{self.work.prompt_len + self.work.output_len} tokens, got {self._limits()}"
            )
        return max(whole, key=lambda one: one.tokens_per_s)

    def judge(self, percentages: str, batch_size: int, num_batches: int) -> Found:
        """Return what a policy with given percentages reaches, the faster of the ways to attend.

        Raises:
            ValueError: the percentages do not add up, or memories do not hold it.
        """
        placement = Placement.parse(percentages)
        tried = []
        for way in self._ways:
            formula = self._formula(batch_size, num_batches, way)
            bound = formula.throughput(placement)
            tried.append(self._whole(formula, [placement], bound))
        found = [each for each in tried if each is not None]
        if not found:
            used = ", ".join(
                f"{size / _GIB:,.4g} GiB of {name}" for name, size in formula.peak_bytes(placement).items()
            )
            raise ValueError(f"expected memories that hold this placement, {used}, got {self._limits()}")
        return max(found, key=lambda one: one.tokens_per_s)

    def gains(self, found: Found, more: int = _GIB) -> dict[str, float]:
        """Return tokens per second that so many bytes more of each memory add to the bound at this size."""
        gained = {}
        for name, attribute in _MEMORIES.items():
            other = PolicySearch(
                self.model,
                self.work,
                self.machine.with_memory(attribute, more),
                found.policy.host_attention,
                self._max_batch,
                is_served=self._is_served,
            )
            best, _ = other._best_number(found.policy.batch_size, found.policy.host_attention)
            gained[name] = max(0.0, best - found.bound)
        return gained

    def _rounded(self, policy: Policy) -> Iterator[tuple[int, int, bool]]:
        """Sizes of a policy: its own, and fewer batches, with which shares of a row's KV are whole blocks."""
        num_blocks = -(-self.work.stored_end // BLOCK_SIZE)
        yield policy.batch_size, policy.num_batches, policy.host_attention
        for share in policy.placement[3:5]:
            if blocks := ceil(share * num_blocks - 1e-6):
                number = floor(policy.num_batches * share * num_blocks / blocks + 1e-6)
                yield policy.batch_size, max(1, number), policy.host_attention

    def _limits(self) -> str:
        sizes = (
            f"{getattr(self.machine, name) / _GIB:,.4g} GiB of {each}" for each, name in _MEMORIES.items()
        )
        return ", ".join(sizes)

    def _sizes(self, way: bool) -> Iterator[int]:
        """Sizes of batches: 1 to 4, then powers of 2, until one batch does not fit."""
        size = 1
        while size <= self._max_batch and self._solved(size, 1, way):
            yield size
            size = size + 1 if size < 4 else 2 * size

    def _best_number(self, batch_size: int, way: bool) -> tuple[float, Policy | None]:
        """The number of batches with the highest bound: throughput rises with it and then falls."""

        def bound(number: int) -> float:
            return self.bound(batch_size, number, way)

        most = 1
        while bound(2 * most) > 0:
            most *= 2
        best = _highest(bound, 1, 2 * most)
        placed = self._solved(batch_size, best, way)
        if not placed:
            return 0.0, None
        return bound(best), Policy(batch_size, best, placed[0], way)

    def _formula(self, batch_size: int, number: int, way: bool) -> Formula:
        return Formula(self.model, self.work, self.machine, batch_size, number, way)

    def _place(self, batch_size: int, number: int, way: bool) -> list[Placement]:
        """The placements with the least time, with and without what moves, the fastest first."""
        formula = self._formula(batch_size, number, way)
        if self.machine.flexgen_memory:
            placed = [self._least(formula, True, True, True)]
        else:
            placed = [each for has_tiles in (True, False) for each in self._by_need(formula, has_tiles)]
        return sorted(filter(None, placed), key=formula.throughput, reverse=True)

    def _by_need(self, formula: Formula, has_tiles: bool) -> Iterator[Placement | None]:
        """Placements with all layers on the device, with some on the host, and with some on the disk too.

        Each but the first costs memory for buffers and time for loads, so it is tried only if the one before
        fills the memory that it relieves. A single layer that moves has a buffer of its own size, which gains
        nothing.
        """
        steps = ((False, False, "device"), (True, False, "host"), (True, True, "disk"))
        for streams, reads_disk, name in steps[: 2 + (self.machine.disk > 0)]:
            found = self._least(formula, streams, reads_disk, has_tiles)
            yield found
            if found is not None:
                shares, limit = np.array([*found, 1.0]), formula.limits()[name]
                memory = self._memory(formula, streams, reads_disk, has_tiles)
                if all(float(form @ shares) < (1 - 1e-6) * limit for form in memory[name]):
                    return

    def _memory(
        self, formula: Formula, streams: bool, reads_disk: bool, has_tiles: bool
    ) -> dict[str, tuple[Form, ...]]:
        has_away = has_tiles and formula.num_batches > 1 and not self._is_served
        return formula.memory(2 * streams, reads_disk=reads_disk, has_tiles=has_tiles, has_away=has_away)

    def _least(self, formula: Formula, streams: bool, reads_disk: bool, has_tiles: bool) -> Placement | None:
        """The placement with the least time; None if nothing fits.

        Args:
            streams: whether layers may leave the device, which then has buffers for two of them.
            reads_disk: whether they may lie on the disk; the host then has buffers for two of them.
            has_tiles: whether keys and values, and activations, may leave it, which then has tiles for them.
        """
        rows: list[Form] = []
        bounds: list[float] = []
        for phase in (0, 1):
            for form in formula.rounds(is_prefill=not phase).values():
                rows.append(np.concatenate([form[:9], -np.eye(2)[phase]]))
                bounds.append(-float(form[9]))
        limits, served = formula.limits(), self._is_served
        # Of a single batch, none waits for its turn.
        stay = not formula.machine.flexgen_memory and (not has_tiles or formula.num_batches == 1)
        fixed = np.array([not streams, 0, 0, not has_tiles or served, 0, 0, stay or served, 0, 0, 1])
        memory = self._memory(formula, streams, reads_disk, has_tiles)
        for name, each in memory.items():
            for form in each:
                if float(form @ fixed) > limits[name]:
                    return None
                rows.append(np.concatenate([form[:9], np.zeros(2)]) / _GIB)
                bounds.append((limits[name] - float(form[9])) / _GIB)
        # Activations on a disk are left out, as in FlexGen: each layer would write and read them.
        upper = [1.0, 1.0, float(reads_disk), *[1.0] * 5, 0.0, None, None]
        lower = [*fixed[:9].astype(float), 0.0, 0.0]
        # Of placements that take as long, the one in the faster memories.
        weights = [1e-9 * place for _ in range(3) for place in range(3)] + [
            1.0,
            float(self.work.output_len - 1),
        ]
        sums = np.concatenate([np.kron(np.eye(3), np.ones(3)), np.zeros((3, 2))], axis=1)
        found = self._solve(
            weights,
            A_ub=np.array(rows),
            b_ub=bounds,
            A_eq=sums,
            b_eq=np.ones(3),
            bounds=list(zip(lower, upper)),
        )
        return Placement(*map(float, np.clip(found.x[:9], 0, 1))) if found.status == 0 else None

    def _whole(self, formula: Formula, near: Sequence[Placement], bound: float) -> Found | None:
        """The policy with shares of whole layers, blocks and batches, judged by the simulated schedule."""
        every = dict.fromkeys(each for placement in near for each in _whole_placements(formula, placement))
        if self._is_served:
            every = {each: None for each in every if each.kv_device == each.activations_device == 1}
        fitting = sorted(filter(formula.fits, every), key=formula.throughput, reverse=True)
        tried = [(ZigZag(formula, placement).run(), placement) for placement in fitting[:_NUM_SIMULATED]]
        if not tried:
            return None
        result, placement = max(tried, key=lambda one: one[0].tokens_per_s)
        limits, peaks = formula.limits(), formula.peak_bytes(placement)
        full = tuple(name for name, used in peaks.items() if used > 0.95 * limits[name])
        policy = Policy(formula.batch_size, formula.num_batches, placement, formula.host_attention)
        return Found(policy, result.tokens_per_s, bound, result.binds, full, peaks)


def _whole_placements(formula: Formula, placement: Placement) -> Iterator[Placement]:
    """Placements of whole layers, of blocks of a row's tokens, and of batches, near one of shares."""
    numbers = (formula.model.num_layers, -(-formula.work.stored_end // BLOCK_SIZE), formula.num_batches)
    near = [_near(placement[3 * index : 3 * index + 3], number) for index, number in enumerate(numbers)]
    for each in product(*near):
        yield Placement(*(share for shares in each for share in shares))


def _near(shares: Sequence[float], number: int) -> list[tuple[float, ...]]:
    """Shares of whole parts next to given ones, each by two parts at most, that sum to 1."""
    ways = [range(max(0, floor(share * number) - 1), ceil(share * number) + 2) for share in shares]
    counts = (one for one in product(*ways) if sum(one) == number)
    return [tuple(count / number for count in one) for one in counts]


def _highest(value: Callable[[int], float], low: int, high: int) -> int:
    """The integer between two with the highest value, of a function that rises and then falls."""
    while high - low > 8:
        step = max(1, (high - low) // 6)
        points = sorted({*range(low, high, step), high})
        best = max(points, key=value)
        low, high = max(low, best - step), min(high, best + step)
    return max(range(low, high + 1), key=value)


def _solver() -> Callable[..., Any]:
    try:
        from scipy.optimize import linprog
    except ImportError:
        raise ValueError(
            f"the search needs scipy, which is not installed: {install_command('offload')}"
        ) from None
    return linprog

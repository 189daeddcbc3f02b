"""Requests with random lengths, and prefixes that several requests share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpu_duo.lab.traces.arrival import Arrival, Rate


@dataclass(frozen=True)
class RandomLengths:
    """Lengths drawn uniformly around a middle, and groups of prompts with a common prefix.

    Attributes:
        input_len, output_len: tokens in the middle; ``input_len`` does not count the prefix.
        range_ratio: lengths are uniform from ``(1 - range_ratio)`` to ``(1 + range_ratio)`` of the middle,
            both ends included, and at least 1. In ``[0, 1)``.
        prefix_len: tokens with which every prompt begins, on top of ``input_len``.
        num_prefixes: different prefixes; each request has one of them at random.

    Raises:
        ValueError: a value out of range.
    """

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1

    def __post_init__(self) -> None:
        for name, least in (("input_len", 1), ("output_len", 1), ("prefix_len", 0), ("num_prefixes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"expected {name} of at least {least}, got {getattr(self, name)}")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"expected range_ratio of at least 0 and below 1, got {self.range_ratio}")

    def draw(
        self, num: int, rate: Rate, rng: np.random.Generator, *, fixes_mean: bool = False
    ) -> list[Arrival]:
        """Draw ``num`` requests in order of time.

        Args:
            fixes_mean: see ``Rate.times``.
        """
        times = rate.times(num, rng, fixes_mean=fixes_mean)
        inputs, outputs = (self._around(middle, num, rng) for middle in (self.input_len, self.output_len))
        prefixes = rng.integers(self.num_prefixes, size=num)
        return [
            Arrival(
                time_s=float(times[at]),
                num_prompt_tokens=self.prefix_len + int(inputs[at]),
                num_output_tokens=int(outputs[at]),
                # One block names the prefix; what stands behind it has no name and is the request's own.
                block_ids=(int(prefixes[at]),) if self.prefix_len else (),
                block_size=max(1, self.prefix_len),
            )
            for at in range(num)
        ]

    def _around(self, middle: int, num: int, rng: np.random.Generator) -> np.ndarray:
        low = max(1, int(np.floor(middle * (1 - self.range_ratio))))
        high = int(np.ceil(middle * (1 + self.range_ratio)))
        return rng.integers(low, high, size=num, endpoint=True)

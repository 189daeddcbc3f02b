"""Synthetic traffic whose prompts tell something of the lengths of their outputs."""

from __future__ import annotations

import numpy as np

from hpu_duo.lab.ranker_training import Examples

VOCAB_SIZE = 64
ASKS_FOR_MUCH, ASKS_FOR_LITTLE = 7, 9


def traffic(num: int, seed: int = 0, noise: float = 0.3) -> Examples:
    """Draw prompts of which some ask for much and some for little, and lengths that mostly follow."""
    rng = np.random.default_rng(seed)
    prompts, lengths = [], []
    for _ in range(num):
        prompt = rng.integers(10, VOCAB_SIZE, rng.integers(4, 40)).astype(np.int32)
        wish = int(rng.integers(3))
        if wish:
            prompt[rng.integers(len(prompt))] = (ASKS_FOR_MUCH, ASKS_FOR_LITTLE)[wish - 1]
        middle = (60, 300, 12)[wish]
        prompts.append(prompt)
        lengths.append(max(1, round(middle * float(np.exp(rng.normal(0, noise))))))
    return Examples(tuple(prompts), np.array(lengths))

"""The zig-zag schedule on a virtual clock: a layer for all batches, then the next one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hpu_duo.modeling.weight_stream import copied_layers
from hpu_duo.planning.offload.formula import NUM_AHEAD, READ, UP, Formula, Placement

_NUM_BUFFERS = 2
_NUM_POSITIONS = 9


class Result(NamedTuple):
    """Time of a schedule.

    Attributes:
        prefill_s, decode_s: of all prompts, and of all output tokens but the first.
        tokens_per_s: output tokens.
        binds: what decodes wait for most.
    """

    prefill_s: float
    decode_s: float
    tokens_per_s: float
    binds: str


class ZigZag:
    """A schedule whose layers lie whole in one memory each.

    While a layer computes for all batches, the weights of the next one are loaded, and what the batches store
    and load goes both ways; all of it ends before the next layer begins. Layers on the disk are read ahead to
    two buffers of the host, while keys, values and activations leave the disk idle; a layer that has not
    arrived is waited for. A layer that has a buffer to itself is loaded once, before all this. The time of a
    decode is that at its own context.

    Args:
        placement: shares of whole layers, of blocks of each row, and of batches.
    """

    def __init__(self, formula: Formula, placement: Placement) -> None:
        self._formula, self._placement = formula, placement
        self._homes = spread(placement[:3], formula.model.num_layers)
        if not formula.machine.flexgen_memory:
            moves = iter(copied_layers(len([home for home in self._homes if home]), NUM_AHEAD))
            self._homes = [home and home * next(moves) for home in self._homes]

    def run(self) -> Result:
        """Run all output tokens."""
        formula, num_outputs = self._formula, self._formula.work.output_len
        prefill = sum(self._layers(True, None).values())
        # Between two of these positions the time is taken as linear in the context.
        positions = np.unique(np.linspace(1, max(1, num_outputs - 1), _NUM_POSITIONS).round())
        passes = [self._layers(False, float(position)) for position in positions]
        waited = {name: sum(each[name] for each in passes) for name in passes[0]}
        times = [sum(each.values()) for each in passes]
        decode = float(np.interp(np.arange(1, num_outputs), positions, times).sum())
        tokens_per_s = formula.num_rows * num_outputs / (prefill + decode)
        return Result(prefill, decode, tokens_per_s, max(waited, key=lambda name: waited[name]))

    def _layers(self, is_prefill: bool, position: float | None) -> dict[str, float]:
        """Seconds of a pass through all layers, in its steady state, by what bound each layer."""
        formula = self._formula
        rounds = formula.rounds(is_prefill, position)
        resources = formula.prefill() if is_prefill else formula.decode(position)
        # Weights on the disk are read ahead: in their layer's own round they come from the host.
        homes = {
            home: np.array([*_one_hot(min(home, 1)), *self._placement[3:], 1.0]) for home in {*self._homes}
        }
        lasts = {
            home: max((float(form @ shares), name) for name, form in rounds.items())
            for home, shares in homes.items()
        }
        read = float(resources[READ][2])
        busy = float(resources[READ] @ np.array([0.0, 0.0, 0.0, *self._placement[3:], 0.0]))
        # The disk rests while a decode that loads first does so, and while prompts wait for the link.
        in_turn = is_prefill or formula.machine.loads_first
        rest = {home: busy + in_turn * float(resources[UP] @ shares) for home, shares in homes.items()}
        seconds: dict[str, float] = dict.fromkeys((READ, *rounds), 0.0)
        pending = [read] * _NUM_BUFFERS
        for _ in range(1 if is_prefill or 2 not in homes else 3):
            seconds = dict.fromkeys(seconds, 0.0)
            for home in self._homes:
                lasted, name = lasts[home]
                if home == 2:
                    seconds[READ] += pending[0]
                    pending = [*pending[1:], read]
                seconds[name] += lasted
                free = max(0.0, lasted - rest[home])
                for index, left in enumerate(pending):
                    pending[index], free = max(0.0, left - free), max(0.0, free - left)
        return seconds


def spread(shares: Sequence[float], num_layers: int) -> list[int]:
    """Return the memory of each layer, spread evenly, so that a long load has short ones beside it.

    Args:
        shares: of the layers in each memory.
    """
    bounds = [round(sum(shares[:end]) * num_layers) for end in range(len(shares) + 1)]
    counts = [end - begin for begin, end in pairwise(bounds)]
    places = (((index + 0.5) / count, place) for place, count in enumerate(counts) for index in range(count))
    return [place for _, place in sorted(places)]


def _one_hot(index: int) -> list[float]:
    return [float(index == each) for each in range(3)]

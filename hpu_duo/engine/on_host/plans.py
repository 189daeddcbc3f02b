"""Plans by which kernels attend to blocks on the host, or in a buffer that they have moved to.

Shapes: N rows, M most tokens of a decode row, K key/value heads, G query heads of each.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from bias_builders import NOWHERE, Leading
from kernels_ref import KVUnits, Partial, StepTensors
from kernels_ref.impl import Kernels
from kernels_ref.step import BlockStep, PartInputs, SlotMasks


def ints(*sizes: int, value: int = 0, device: torch.device | None = None) -> torch.Tensor:
    """Return int32 numbers ``[*sizes]`` of one value."""
    return torch.full(sizes, value, dtype=torch.int32, device=device)


def step_tensors(**fields: torch.Tensor) -> StepTensors:
    """The plan of a step with these fields; nothing reads the others."""
    return StepTensors(**{name: fields.get(name, ints(0)) for name in StepTensors._fields})


class WholeBlocks(NamedTuple):
    """The plan of rows that see all slots of the blocks that they own, and no other."""

    tensors: StepTensors
    blocks: BlockStep

    @classmethod
    def of(cls, num_rows: int, owner: torch.Tensor, units: KVUnits) -> WholeBlocks:
        """Return the plan, where ``owner`` is; units are any of the layout."""
        zeros = ints(num_rows, 1, device=owner.device)
        tensors = step_tensors(
            owner=owner,
            tail_block=zeros + (units.layout.num_units - 1),
            tail_start=ints(num_rows, 1, value=NOWHERE, device=owner.device),
        )
        # As many tokens as queries of a head, of which each sees no slot of a tail.
        tails = Leading(zeros[:, None])
        return cls(
            tensors, BlockStep(zeros[:0, 0], tails, zeros, SlotMasks.of(tails, units.layout.num_slots))
        )

    def attend(self, run: Kernels, units: KVUnits, inputs: PartInputs, q_NKHD: torch.Tensor) -> Partial:
        """The tokens of rows against their blocks: ``[N, K, M * G, ...]``."""
        given = inputs._replace(q=q_NKHD, units=units, tensors=self.tensors, rule=None)
        return run.unique_blocks(given, self.blocks)


def prompt_tensors(num_new: int, num_blocks: int, num_slots: int, device: torch.device) -> StepTensors:
    """The plan of a prompt row with so many new tokens that sees the first blocks of a buffer."""
    some = partial(ints, device=device)
    number = torch.arange(num_blocks, dtype=torch.int32, device=device)
    end = some(1, value=num_blocks * num_slots)
    return step_tensors(
        positions=end.expand(num_new),
        row=some(num_new),
        causal_row=some(num_new),
        row_start=end,
        row_num_new=some(1, value=num_new),
        row_query_start=some(1),
        shared_block=number,
        shared_start=number * num_slots,
        shared_reads=torch.cat([some(1, num_blocks, value=1), some(1, num_blocks)]),
    )

"""Implementations of the kernels that compute the parts."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch

from bias_builders import TopBlocks
from kernels_ref.hpu.attention import NO_OPERATORS, FusedOperators
from kernels_ref.partial import Partial
from kernels_ref.step import PartInputs
from kernels_ref.units import KVRecord, KVUnits

if TYPE_CHECKING:
    from kernels_ref.groups.column_sums import ChunkStep
    from kernels_ref.sparse import TileStep
    from kernels_ref.step import BlockStep, RingStep


class Implementation(str, Enum):
    """``reference``: portable torch. ``sdpa``: torch's fused CPU attention. ``triton``: CUDA kernels.
    ``hpu``: the fused operators of Gaudi's software.
    """

    REFERENCE = "reference"
    SDPA = "sdpa"
    TRITON = "triton"
    HPU = "hpu"

    @property
    def reads_floats(self) -> bool:
        """Whether its kernels read keys and values by pointer, hence plain floats only."""
        return self in (Implementation.SDPA, Implementation.TRITON)

    @property
    def reads_masks(self) -> bool:
        """Whether its kernels for decode rows read masks of slots, which a step derives once."""
        return not self.reads_floats


class Kernels(Protocol):
    """The parts; see ``kernels_ref.reference`` for what each one computes.

    An implementation reads stores through ``KVUnits``, and visibility from the step: leading slots where
    positions are in order, else an interval of positions for each query. ``inputs.rule`` hides more by
    position.
    """

    def causal(self, inputs: PartInputs) -> Partial:
        """Tokens of prompt rows against the new keys of their own row."""
        ...

    def shared_blocks(self, inputs: PartInputs) -> Partial:
        """Every query against the blocks that several rows read, or a prompt row."""
        ...

    def chosen_blocks(self, inputs: PartInputs, tiles: TileStep, choice: TopBlocks) -> Partial:
        """Tokens of prompt rows against the blocks that are chosen for them; see ``kernels_ref.sparse``."""
        ...

    def shared_rings(self, inputs: PartInputs, ring: RingStep) -> Partial:
        """Tokens of prompt rows against their rings as of before the step, by ``tensors.chunk_row``."""
        ...

    def unique_blocks(self, inputs: PartInputs, blocks: BlockStep) -> Partial:
        """Decode rows against the blocks that only they read."""
        ...

    def unique_rings(self, inputs: PartInputs, ring: RingStep) -> Partial:
        """Decode rows against their own ring."""
        ...

    def rows_in_rings(self, inputs: PartInputs, ring: RingStep) -> torch.Tensor:
        """Attention of decode rows whose ring is all that they see: ``[N, K, M * G, D]``, by masks."""
        ...

    def unique_with_weights(self, inputs: PartInputs, ring: RingStep) -> tuple[Partial, torch.Tensor]:
        """Decode rows against their own slots, with weights; see ``kernels_ref.groups.budget_slots``."""
        ...

    def column_sums(
        self,
        inputs: PartInputs,
        lse_QKG: torch.Tensor,
        slots_PKCD: torch.Tensor | None,
        chunk: ChunkStep,
        num_observed: int | None,
    ) -> torch.Tensor:
        """Sums of the weights of prompt rows by slot and new key; see ``kernels_ref.groups.column_sums``."""
        ...

    def eviction_victims(
        self,
        score_NKC: torch.Tensor | None,
        position_NKC: torch.Tensor,
        is_protected: torch.Tensor | None,
    ) -> torch.Tensor:
        """The eviction victim of each head; see ``kernels_ref.groups.budget_slots``."""
        ...

    def write_kv(self, units: KVUnits, index: torch.Tensor, record: KVRecord) -> None:
        """Write the keys and values of new tokens; see ``kernels_ref.units.write_kv``."""
        ...

    def finish(
        self,
        q_QKGD: torch.Tensor,
        of_tokens: list[Partial],
        of_rows: Partial | None,
        decode_slot: torch.Tensor,
        sinks_KG: torch.Tensor | None,
    ) -> torch.Tensor:
        """Merge, add sink logits, normalise; see ``kernels_ref.partial.finish``."""
        ...


def kernels(impl: Implementation, operators: FusedOperators = NO_OPERATORS) -> Kernels:
    """Return an implementation; optional packages are imported only here.

    Args:
        operators: fused operators for ``hpu``.
    """
    match impl:
        case Implementation.REFERENCE:
            from kernels_ref import reference

            return reference
        case Implementation.SDPA:
            from kernels_ref import sdpa

            return sdpa
        case Implementation.TRITON:
            from kernels_ref.triton import parts

            return parts
        case Implementation.HPU:
            from kernels_ref.hpu.parts import FusedKernels

            return FusedKernels(operators)

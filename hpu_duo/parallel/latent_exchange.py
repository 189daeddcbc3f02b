"""Context-parallel latents: every rank has the new ones, and stores and reads its part of the tokens.

Shapes: as in ``kernels_ref.groups.latents``; O heads of this rank among K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from hpu_duo.parallel.head_exchange import EXCHANGE_COPIES, ContextParallelBlocks, ContextParallelStep
from kernels_ref import Blocks, LatentKV, LatentSize, Partial, Step
from kernels_ref.groups import HeadSizes, PartInputs, PartSizes
from kernels_ref.groups.kind import FLOAT32, causal_bytes
from kernels_ref.groups.latents import StoresLatents, latent_heads
from kernels_ref.partial import fold, unfold
from kernels_ref.units import gather

if TYPE_CHECKING:
    from kernels_ref.impl import Kernels


@dataclass(frozen=True)
class ContextParallelLatents(StoresLatents, ContextParallelBlocks):
    """Heads that store the latents of all tokens, once for all heads, in context-parallel blocks.

    New latents are the same on all ranks, so ranks gather absorbed queries only. Each attends with those of
    all heads to its latents, and the rank of a head merges the partials of all ranks before it multiplies
    them by its value projection.

    Attributes:
        latent: sizes of a latent.
    """

    latent: LatentSize
    name: ClassVar[str] = "context-parallel latents"

    def attend(self, run: Kernels, inputs: PartInputs, step: Step) -> torch.Tensor:
        """Writes first; see ``ContextParallelBlocks``."""
        parts, t, units, q_QO1D = step.parts, inputs.tensors, inputs.units, inputs.q
        new = inputs.new
        assert isinstance(new, LatentKV), "a store of latents gets latents"
        plan: ContextParallelStep = step.plans[self.key, units.layout]
        run.write_kv(units, plan.own.write_index, units.encode(new.stored))
        has_shared = parts.shared and t.shared_block.shape[0] > 0
        of_tokens: list[Partial] = []
        decoded = None
        if has_shared or parts.unique:
            (queries,) = self._asked(q_QO1D, step, has_shared=has_shared)
            (q_AKC,) = self.exchange.gather([new.absorb(queries)[:, 0]])
            met = inputs._replace(q=q_AKC[:, None], new=new.stored)
            if parts.unique:
                of_rows = gather(met.q, step.row_token) if has_shared else met.q
                decoded = run.unique_blocks(met._replace(q=fold(of_rows, step.decode_len)), plan.own)
                decoded = _by_head(unfold(decoded, step.decode_len))
            if has_shared:
                shared = run.shared_blocks(met._replace(tensors=t._replace(shared_start=plan.shared_start)))
                merged, decoded = self._merged(_by_head(shared), decoded)
                of_tokens.append(merged)
            elif decoded is not None:
                decoded = self.exchange.merge_few(decoded)
        if not q_QO1D.shape[1]:
            return q_QO1D.new_empty(*q_QO1D.shape[:-1], new.to_values.shape[1])
        of_tokens = [new.lift(_by_head(each)) for each in of_tokens]
        if parts.causal:
            of_tokens.append(run.causal(inputs._replace(new=new.expanded())))
        if decoded is not None:
            decoded = new.lift(_by_head(decoded))
        return run.finish(q_QO1D, of_tokens, decoded, step.decode_slot, inputs.sinks)

    def transient_bytes(self, heads: HeadSizes, sizes: PartSizes) -> int:
        """Intermediates of new tokens, of latents for the heads of all ranks, and of exchanges."""
        every = latent_heads(heads._replace(num_heads=self.exchange.num_heads), self.latent)
        context = replace(sizes.parts, causal=False)
        own = sizes._replace(block_size=self.num_slots(sizes.block_size), parts=context)
        num_rows = sizes.num_rows * sizes.decode_len if sizes.parts.unique else 0
        has_shared = sizes.parts.shared and sizes.num_shared_blocks > 0
        num_queries = sizes.query_len if has_shared else num_rows
        num_merged = num_rows + (sizes.query_len if has_shared else 0)
        sent = num_queries * every.num_query_heads * self.latent.size * heads.dtype_bytes
        triples = num_merged * every.num_query_heads * (self.latent.rank + 2) * FLOAT32
        met = max(causal_bytes(heads, sizes), Blocks().transient_bytes(every, own))
        return met + EXCHANGE_COPIES * (sent + triples)


def _by_head(partial: Partial) -> Partial:
    """``[A, 1, K, ...]``, of one key/value head, as ``[A, K, 1, ...]``, and the other way round."""
    return Partial(*(each.transpose(1, 2) for each in partial))

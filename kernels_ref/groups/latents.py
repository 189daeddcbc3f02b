"""Heads whose keys and values are functions of one latent of each token (MLA), which is all that is stored.

Stored tokens are read *absorbed*: queries are multiplied by the key projection, all heads attend to the
latents themselves, and their partials are multiplied by the value projection before they are merged. That is
exact, since a partial is linear in values. New tokens of prompts are read *expanded*, by keys and values of
each head, which takes fewer operations for many queries.

Shapes: as in ``kernels_ref.reference``; L elements of a latent, R of its rotary part, C = L + R, P elements
of a key without the rotary part. Each query head has a key of its own: K heads of G = 1 for all parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from kernels_ref.decoding import WrappingKernels
from kernels_ref.formats import LATENT, KVFormat
from kernels_ref.groups.blocks import Blocks
from kernels_ref.groups.kind import GroupKind, HeadSizes, PartSizes
from kernels_ref.groups.rings import Rings
from kernels_ref.partial import Partial
from kernels_ref.step import BlockStep, PartInputs, RingStep, Step, StepParts
from kernels_ref.units import KVRecord, KVUnits, NewKV

if TYPE_CHECKING:
    from kernels_ref.impl import Kernels


class LatentSize(NamedTuple):
    """Sizes of a latent.

    Attributes:
        rank: elements that keys and values are functions of (L).
        rotary: elements of the rotary part, which is that of the keys of all heads (R).
    """

    rank: int
    rotary: int

    @property
    def size(self) -> int:
        """Elements of both (C)."""
        return self.rank + self.rotary


class LatentKV(NamedTuple):
    """Latents of the new tokens of a step, and the projections to keys and values.

    Attributes:
        latent: with the rotary part behind it, ``[Q, 1, C]``.
        to_keys: ``[K, P, L]``.
        to_values: ``[K, D, L]``.
    """

    latent: torch.Tensor
    to_keys: torch.Tensor
    to_values: torch.Tensor

    @property
    def rank(self) -> int:
        """Elements of a latent without the rotary part."""
        return self.to_keys.shape[2]

    @property
    def stored(self) -> NewKV:
        """The latents as keys and values of one head."""
        return NewKV(self.latent, self.latent[..., : self.rank])

    def of_heads(self, begin: int, end: int) -> LatentKV:
        """Return the same for some of the heads."""
        if end - begin == len(self.to_keys):
            return self
        return self._replace(to_keys=self.to_keys[begin:end], to_values=self.to_values[begin:end])

    def expanded(self) -> NewKV:
        """Keys ``[Q, K, P + R]`` and values ``[Q, K, D]`` of each head."""
        latent, rotary = self.latent[:, 0, : self.rank], self.latent[..., self.rank :]
        # Two products, so that no column of a result is a view that a graph writes to.
        keys, values = (
            torch.einsum("ql,kdl->qkd", latent, weight) for weight in (self.to_keys, self.to_values)
        )
        return NewKV(torch.cat([keys, rotary.expand(-1, keys.shape[1], -1)], dim=-1), values)

    def absorb(self, q_NKMD: torch.Tensor) -> torch.Tensor:
        """Queries of keys as queries of latents: ``[N, K, M, P + R]`` to ``[N, 1, M * K, C]``."""
        num_rows, num_heads, num_tokens, _ = q_NKMD.shape
        size = self.to_keys.shape[1]
        of_heads = q_NKMD[..., :size].transpose(0, 1).reshape(num_heads, num_rows * num_tokens, size)
        met = torch.matmul(of_heads, self.to_keys).unflatten(1, (num_rows, num_tokens))
        both = torch.cat([met.permute(1, 2, 0, 3), q_NKMD[..., size:].transpose(1, 2)], dim=-1)
        return both.reshape(num_rows, 1, num_tokens * num_heads, self.latent.shape[-1])

    def project(self, attn_N1HL: torch.Tensor) -> torch.Tensor:
        """Averages of latents as averages of values: ``[N, 1, M * K, L]`` to ``[N, K, M, D]``."""
        num_rows, num_heads = len(attn_N1HL), len(self.to_values)
        of_heads = attn_N1HL.view(num_rows, -1, num_heads, self.rank).permute(2, 0, 1, 3)
        num_tokens = of_heads.shape[2]
        flat = of_heads.reshape(num_heads, num_rows * num_tokens, self.rank)
        values = torch.matmul(flat.to(self.to_values.dtype), self.to_values.transpose(1, 2))
        return values.unflatten(1, (num_rows, num_tokens)).transpose(0, 1)

    def lift(self, partial: Partial) -> Partial:
        """The partial over values from that over latents; heads as in ``project``."""
        # Averages have the range of latents, which sums over a long text would leave in 16 bits.
        least = torch.finfo(torch.float32).tiny
        values = self.project(partial.attn / torch.clamp(partial.sum, min=least)[..., None])
        largest, total = (
            x.unflatten(2, (-1, len(self.to_values))).transpose(2, 3)[:, 0] for x in partial[1:]
        )
        return Partial(values.float() * total[..., None], largest, total)


@dataclass(frozen=True)
class LatentKernels(WrappingKernels):
    """Kernels for queries of each head where a store has latents.

    Args:
        inner: kernels, which attend to latents as to one key and value of many query heads.
        new: the new latents, and the projections.
    """

    inner: Kernels
    new: LatentKV

    def shared_blocks(self, inputs: PartInputs) -> Partial:
        """Every query against the blocks that several rows read, or a prompt row."""
        return self.new.lift(self.inner.shared_blocks(self._absorbed(inputs)))

    def shared_rings(self, inputs: PartInputs, ring: RingStep) -> Partial:
        """Tokens of prompt rows against their rings as of before the step."""
        return self.new.lift(self.inner.shared_rings(self._absorbed(inputs), ring))

    def unique_blocks(self, inputs: PartInputs, blocks: BlockStep) -> Partial:
        """Decode rows against the blocks that only they read."""
        return self.new.lift(self.inner.unique_blocks(self._absorbed(inputs), blocks))

    def unique_rings(self, inputs: PartInputs, ring: RingStep) -> Partial:
        """Decode rows against their own ring."""
        return self.new.lift(self.inner.unique_rings(self._absorbed(inputs), ring))

    def rows_in_rings(self, inputs: PartInputs, ring: RingStep) -> torch.Tensor:
        """Attention of decode rows whose ring is all that they see."""
        return self.new.project(self.inner.rows_in_rings(self._absorbed(inputs), ring))

    def write_kv(self, units: KVUnits, index: torch.Tensor, record: KVRecord) -> None:
        """Write the latents of new tokens."""
        self.inner.write_kv(units, index, KVRecord(self.new.stored, (self.new.latent,)))

    def _absorbed(self, inputs: PartInputs) -> PartInputs:
        return inputs._replace(q=self.new.absorb(inputs.q), new=self.new.stored)


def with_latents(run: Kernels, inputs: PartInputs, parts: StepParts) -> tuple[Any, PartInputs]:
    """Return kernels and inputs of heads whose new keys and values are latents."""
    new: Any = inputs.new
    assert isinstance(new, LatentKV), "a store of latents gets latents"
    # Decodes need no keys of each head.
    return LatentKernels(run, new), inputs._replace(new=new.expanded() if parts.causal else new.stored)


def latent_heads(heads: HeadSizes, latent: LatentSize) -> HeadSizes:
    """Return the heads as the kernels see them that read stored tokens."""
    return heads._replace(num_heads=1, group_size=heads.num_query_heads, head_dim=latent.size)


_NONE = LatentSize(0, 0)


class StoresLatents(GroupKind):
    """Storage of latents, which all heads of a group read."""

    plain_format: ClassVar[KVFormat] = LATENT
    latent: LatentSize

    @property
    def takes_any_format(self) -> bool:
        """Return False: one scale of latent and rotary part together would round either."""
        return False

    def num_kept(self, num_heads: int) -> int:
        """Return 1: all heads read the same latents."""
        return 1

    def stored_dims(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """Return the sizes of a latent, with and without the rotary part."""
        return self.latent.size, self.latent.rank


@dataclass(frozen=True)
class LatentBlocks(StoresLatents, Blocks):
    """Heads that store the latents of all tokens, once for all heads, in blocks.

    Attributes:
        latent: sizes of a latent.
    """

    latent: LatentSize = _NONE
    name: ClassVar[str] = "latent blocks"

    def attend(self, run: Kernels, inputs: PartInputs, step: Step) -> torch.Tensor:
        """Writes first; see ``Blocks``."""
        return Blocks.attend(self, *with_latents(run, inputs, step.parts), step)

    def transient_bytes(self, heads: HeadSizes, sizes: PartSizes) -> int:
        """Those of new tokens, which are expanded, and those of latents."""
        of_new = Blocks.transient_bytes(self, heads, _of_new(sizes))
        return max(of_new, Blocks.transient_bytes(self, latent_heads(heads, self.latent), sizes))


@dataclass(frozen=True)
class LatentRings(StoresLatents, Rings):
    """Heads that store the latents of a window, once for all heads, in a ring of each row.

    Attributes:
        latent: sizes of a latent.
    """

    latent: LatentSize = _NONE
    name: ClassVar[str] = "latent rings"

    def attend(self, run: Kernels, inputs: PartInputs, step: Step) -> torch.Tensor:
        """Writes first; see ``Rings``."""
        return Rings.attend(self, *with_latents(run, inputs, step.parts), step)

    def transient_bytes(self, heads: HeadSizes, sizes: PartSizes) -> int:
        """Those of new tokens, which are expanded, and those of latents."""
        of_new = Rings.transient_bytes(self, heads, _of_new(sizes))
        return max(of_new, Rings.transient_bytes(self, latent_heads(heads, self.latent), sizes))


def _of_new(sizes: PartSizes) -> PartSizes:
    return sizes._replace(parts=StepParts(sizes.parts.causal, False, False))

"""Kernels that read floats, for stores of other formats.

Shapes: as in ``kernels_ref.reference``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from bias_builders import Leading, TopBlocks
from kernels_ref import reference
from kernels_ref import units as portable
from kernels_ref.chunks import even_size
from kernels_ref.partial import Partial, merge
from kernels_ref.sparse import TileStep
from kernels_ref.step import BlockStep, PartInputs, RingStep
from kernels_ref.units import KVRecord, KVUnits, gather, of_stores

if TYPE_CHECKING:
    from kernels_ref.formats import KVFormat

_MOST_CHUNKS = 16
"""Most chunks of the unique part where a compiler unrolls its loop, or a device launches each of them."""


def chunk_bytes(device: torch.device, is_decode: bool) -> int:
    """Most bytes of the decoded keys of a chunk: 16 MiB; of decode rows on a CPU 1 MiB, about a cache."""
    return 1 << 20 if is_decode and device.type == "cpu" else 16 << 20


class ReadsFormats(Protocol):
    """An ``Implementation``, whose module imports this one."""

    def serves(self, kv_format: KVFormat) -> bool:
        """Whether its kernels read keys and values of a format."""
        ...


@dataclass(frozen=True)
class WrappingKernels:
    """Kernels that override some of others.

    Args:
        inner: the others.
    """

    inner: Any

    def __getattr__(self, name: str) -> Any:
        """Return a kernel of ``inner``."""
        return getattr(self.inner, name)


@dataclass(frozen=True)
class DecodingKernels(WrappingKernels):
    """Kernels that attend to decoded chunks of blocks where they do not read the format of a store.

    Rings and heads with a budget run by the portable parts then. New keys and values, copies of rings and
    partials are floats in any case.

    Args:
        inner: kernels that read floats by pointer.
        impl: which these are, with all formats that they read; None = they read plain floats.
        tile: as ``KVUnits.tile``, for ``shared_blocks`` and ``unique_blocks``.
    """

    impl: ReadsFormats | None = None
    tile: Callable[[KVUnits, torch.Tensor | slice], tuple[torch.Tensor, torch.Tensor]] = KVUnits.tile

    def shared_blocks(self, inputs: PartInputs) -> Partial:
        """Every query against the blocks that several rows read, or a prompt row."""
        units, t = inputs.units, inputs.tensors
        num_blocks = t.shared_block.shape[0]
        if self._reads(units) or not num_blocks:
            return self.inner.shared_blocks(inputs)
        total, size = (
            None,
            even_size(num_blocks, max(1, chunk_bytes(inputs.q.device, False) // units.key_bytes)),
        )
        for begin in range(0, num_blocks, size):
            some = slice(begin, begin + size)
            block = t.shared_block[some]
            of_chunk = t._replace(
                shared_block=_numbers(block, len(block)),
                shared_start=t.shared_start[some],
                shared_reads=t.shared_reads[:, some].contiguous(),
            )
            decoded = _dense(*self.tile(units, block))
            partial = self.inner.shared_blocks(inputs._replace(units=decoded, tensors=of_chunk))
            total = partial if total is None else merge(total, partial)
        assert total is not None, "there are blocks"
        return total

    def chosen_blocks(self, inputs: PartInputs, tiles: TileStep, choice: TopBlocks) -> Partial:
        """Tokens of prompt rows against the blocks that are chosen for them."""
        return self._reading(inputs.units).chosen_blocks(inputs, tiles, choice)

    def unique_blocks(self, inputs: PartInputs, blocks: BlockStep) -> Partial:
        """Decode rows against the blocks that only they read.

        The first chunk has the tails of rows behind its blocks, others have no slots of tails.
        """
        units, t = inputs.units, inputs.tensors
        if self._reads(units):
            return self.inner.unique_blocks(inputs, blocks)
        is_on_cpu = inputs.q.device.type == "cpu"
        num_bytes, least, place = chunk_bytes(inputs.q.device, True), 1, None
        if not is_on_cpu or torch.compiler.is_compiling():
            least = -(-t.owner.shape[0] // _MOST_CHUNKS)
        else:
            # Other blocks of the slice are free ones and those of cached prefixes: up to the whole store.
            place = (t.owner < inputs.q.shape[0]).nonzero().flatten()
            starts = gather(t.owner_start, place) if len(t.owner_start) else t.owner_start
            t = t._replace(owner=gather(t.owner, place), owner_start=starts)
        num_blocks, tails = t.owner.shape[0], blocks.tails
        most = max(num_bytes // units.key_bytes, least, 1)
        size, total = even_size(max(1, num_blocks), most), None
        for begin in range(0, max(1, num_blocks), size):
            some = slice(begin, min(begin + size, num_blocks))
            owner = t.owner[some]
            k, v = self.tile(units, some if place is None else place[some])
            tail = torch.zeros_like(t.tail_block)
            if total is None:
                tail = _numbers(t.tail_block, t.tail_block.numel(), len(owner)).view(t.tail_block.shape)
                more_k, more_v = self.tile(units, t.tail_block.view(-1))
                k, v = torch.cat([k, more_k]), torch.cat([v, more_v])
            of_chunk = t._replace(owner=owner, owner_start=t.owner_start[some], tail_block=tail)
            decoded = inputs._replace(units=_dense(k, v), tensors=of_chunk)
            partial = self.inner.unique_blocks(decoded, blocks._replace(tails=tails))
            total = partial if total is None else merge(total, partial)
            tails = Leading(torch.zeros_like(tails.visible))
        assert total is not None, "there is a chunk"
        return total

    def unique_rings(self, inputs: PartInputs, ring: RingStep) -> Partial:
        """Decode rows against their own ring."""
        return self._reading(inputs.units).unique_rings(inputs, ring)

    def unique_with_weights(self, inputs: PartInputs, ring: RingStep) -> tuple[Partial, torch.Tensor]:
        """Decode rows against their own slots, with the weight of each slot."""
        return self._reading(inputs.units).unique_with_weights(inputs, ring)

    def write_kv(self, units: KVUnits, index: torch.Tensor, record: KVRecord) -> None:
        """Write the keys and values of new tokens."""
        write = self.inner.write_kv if self._reads(units) else portable.write_kv
        write(units, index, record)

    def _reads(self, units: KVUnits) -> bool:
        kv_format = units.encoding.format
        return kv_format.is_plain or (self.impl is not None and self.impl.serves(kv_format))

    def _reading(self, units: KVUnits) -> Any:
        return self.inner if self._reads(units) else reference


def _dense(k: torch.Tensor, v: torch.Tensor) -> KVUnits:
    return of_stores(k.contiguous(), v.contiguous())


def _numbers(like: torch.Tensor, num: int, first: int = 0) -> torch.Tensor:
    """Ids of units ``first`` and after it."""
    return torch.arange(first, first + num, dtype=like.dtype, device=like.device)

"""A quantised weight in memory: codes of 4 or 8 bits, scales and zero points.

Every encoding of linear layers becomes this one. Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hpu_duo.modeling.quantised.format import Activations, in_slabs

NIBBLE = 4
"""Bits of the smaller codes: two of them are in a byte, the first in its lower half."""
FP8_MAX = 448.0
"""The largest number of e4m3."""


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight ``[N, K]``: ``(code - zero) * scale``.

    Attributes:
        codes: ``[N, K]`` of int8, uint8 or e4m3, or of 4 bits: uint8 ``[N, ceil(K / 2)]``.
        scales: ``[ceil(N / B), ceil(K / C)]`` for ``block`` ``(B, C)``, of a floating-point type; with
            ``group_of``, ``[ceil(N / B), groups]``.
        shape: N and K.
        block: outputs and inputs that share a scale. (1, K) is a scale of each output.
        zeros: codes of zero, of the shape of the scales, or one for all.
        bits: of a code.
        group_of: int64 ``[K]``, the column of scales of each input; None = groups of neighbours.
        input_scale: constant that inputs are divided by before they are rounded to fp8, where a product of
            the device takes them so; None = there is none.
        largest: fp8 number that codes may be.
        activations: rounding of the inputs that the checkpoint states; a static one is by ``input_scale``.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    shape: tuple[int, int]
    block: tuple[int, int]
    zeros: torch.Tensor | int = 0
    bits: int = 8
    group_of: torch.Tensor | None = None
    input_scale: float | None = None
    largest: float = FP8_MAX
    activations: Activations | None = None

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors of the weight, the codes first."""
        for each in (self.codes, self.scales, self.zeros, self.group_of):
            if isinstance(each, torch.Tensor):
                yield each

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(each.nbytes for each in self.tensors)

    @property
    def label(self) -> str:
        """Name of the format in reports, such as "int4 g128"."""
        kind = "fp8" if self.codes.is_floating_point() else f"int{self.bits}"
        if self.scales.shape[1] == 1:
            return kind
        rows, columns = self.block
        return f"{kind} g{columns}" if rows == 1 else f"{kind} {rows}x{columns}"

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, computed in float32 and rounded once."""
        return in_slabs(self.codes, self.shape, dtype, self._rows)

    def _rows(self, some: slice) -> torch.Tensor:
        num_inputs = self.shape[1]
        codes = self.codes[some] if self.bits != NIBBLE else unpack_nibbles(self.codes[some], num_inputs)
        values = codes.float()
        if isinstance(self.zeros, int):
            if self.zeros:
                values -= self.zeros
        else:
            values -= self._of_rows(self.zeros, some)
        return values.mul_(self._of_rows(self.scales, some))

    def _of_rows(self, table: torch.Tensor, some: slice) -> torch.Tensor:
        """Entries of a table of the scales' shape for some outputs, ``[R, K]`` or what broadcasts to it."""
        num_outputs, num_inputs = self.shape
        rows, columns = self.block
        if table.shape[0] == 1:
            found = table.float()
        else:
            index = torch.arange(num_outputs, device=table.device)[some]
            found = table[index if rows == 1 else index // rows].float()
        if self.group_of is not None:
            return found[:, self.group_of]
        return found if found.shape[1] == 1 else found.repeat_interleave(columns, 1)[:, :num_inputs]

    def select(self, dim: int, index: torch.Tensor) -> QuantisedWeight:
        """Return a weight of some of the outputs (``dim`` 0) or inputs (1), in the order of ``index``.

        Codes move unchanged. Inputs that are no whole groups then have an index of their groups.

        Raises:
            ValueError: inputs are rounded in groups, which are not whole then.
        """
        index = index.to(self.codes.device)
        group = None if self.activations is None else self.activations.group
        if dim == 1 and group is not None and not _are_whole(index // group, group):
            raise ValueError(
                f"expected inputs that are moved or cut by whole groups of {group}, which share a scale: "
                "activations='weights' keeps them in the model's dtype"
            )
        return self._of_outputs(index) if dim == 0 else self._of_inputs(index)

    def _of_outputs(self, index: torch.Tensor) -> QuantisedWeight:
        whole = replace(self, codes=self.codes[index], shape=(len(index), self.shape[1]))
        rows = self.block[0]
        if self.scales.shape[0] == 1:
            return whole
        blocks = index // rows
        if _are_whole(blocks, rows):
            blocks = blocks[::rows]
        else:
            whole = replace(whole, block=(1, self.block[1]))
        zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[blocks]
        return replace(whole, scales=self.scales[blocks], zeros=zeros)

    def _of_inputs(self, index: torch.Tensor) -> QuantisedWeight:
        num_outputs, num_inputs = self.shape
        codes = self.codes
        if self.bits == NIBBLE:
            codes = pack_nibbles(unpack_nibbles(codes, num_inputs)[:, index])
        else:
            codes = codes.view(torch.uint8)[:, index].view(codes.dtype)
        whole = replace(self, codes=codes, shape=(num_outputs, len(index)))
        if self.scales.shape[1] == 1:
            return whole
        columns = self.block[1]
        groups = index // columns if self.group_of is None else self.group_of[index]
        group_of = None
        if _are_whole(groups, columns):
            groups = groups[::columns]
        else:
            groups, group_of = groups.unique(return_inverse=True)
        zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[:, groups]
        return replace(whole, scales=self.scales[:, groups], zeros=zeros, group_of=group_of)

    def halved(self) -> QuantisedWeight:
        """Return fp8 codes of half the size, with scales twice as large: those of Gaudi 2 end at 240.

        Exact but for odd codes below 2^-5, which are rounded to even.
        """
        codes = (self.codes.float() * 0.5).to(self.codes.dtype)
        inputs = None if self.input_scale is None else self.input_scale * 2
        return replace(
            self, codes=codes, scales=self.scales * 2, input_scale=inputs, largest=self.largest / 2
        )


def _are_whole(blocks: torch.Tensor, size: int) -> bool:
    """Whether neighbours are of one block, ``size`` by ``size`` from the first one on."""
    first = blocks[::size].repeat_interleave(size)[: len(blocks)]
    return bool((blocks == first).all())


def order_of_groups(stored: QuantisedWeight) -> torch.Tensor | bool | None:
    """Return an order that makes inputs of a group neighbours; None if they are, False if sizes differ."""
    if stored.group_of is None:
        return None
    sizes = stored.group_of.bincount(minlength=stored.scales.shape[1])
    return stored.group_of.argsort(stable=True) if bool((sizes == stored.block[1]).all()) else False


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return codes below 16, uint8 ``[..., K]``, two to a byte; the last one has 0 beside it if K is odd."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | codes[..., 1::2] << NIBBLE


def unpack_nibbles(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``count`` codes of each line, uint8 ``[..., count]``."""
    return torch.stack((packed & 15, packed >> NIBBLE), dim=-1).flatten(-2)[..., :count]

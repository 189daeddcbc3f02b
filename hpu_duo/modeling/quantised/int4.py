"""Weights of 2, 4 or 8 bits in words of 32, with a scale and perhaps a zero point for groups of inputs.

A weight is ``[N, K]``; scales and zero points are ``[N, G]``. ``group_of`` ``[K]`` is the group of each
input, if they are not neighbours. The layouts of compressed-tensors, GPTQ and AWQ differ in what is in a
word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from hpu_duo.modeling.quantised.format import FLOATS, Header

if TYPE_CHECKING:
    import torch

    from hpu_duo.modeling.quantised.weight import QuantisedWeight

WORD = 32
BITS = (2, 4, 8)
"""Bits of a code that do not straddle words."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of a word, from the lowest, of each of eight neighbouring outputs."""


def unpack(words: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Return the codes of int32 words, uint8 ``[..., W * 32 / bits]``.

    Args:
        words: ``[..., W]``.
        bits: of a code; the first one lies in the lowest bits.
        order: place in the word of each code, if it is another.
    """
    import torch  # Slow to import, and not needed by plans.

    places = range(WORD // bits) if order is None else order
    codes = torch.empty(*words.shape, len(places), dtype=torch.uint8, device=words.device)
    for code, place in enumerate(places):
        # The shift is an arithmetic one, hence the mask after it.
        codes[..., code] = (words >> place * bits).bitwise_and_((1 << bits) - 1)
    return codes.flatten(-2)


def weight_of(
    codes: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | int,
    group_of: torch.Tensor | None,
) -> QuantisedWeight:
    """Return a weight ``(codes - zeros) * scales``.

    Args:
        codes: uint8 ``[N, K]``.
        bits: of a code; fewer than 4 are stored in 4.
        scales: ``[N, G]``.
        zeros: ``[N, G]``, or one for all.
        group_of: ``[K]``; None = G groups of neighbours.
    """
    from hpu_duo.modeling.quantised.weight import NIBBLE, QuantisedWeight, pack_nibbles

    num_outputs, num_inputs = codes.shape
    stored = pack_nibbles(codes) if bits <= NIBBLE else codes.contiguous()
    block = 1, num_inputs // scales.shape[1]
    shape = num_outputs, num_inputs
    zeros = zeros if isinstance(zeros, int) else zeros.contiguous()
    return QuantisedWeight(stored, scales.contiguous(), shape, block, zeros, max(bits, NIBBLE), group_of)


def num_groups(codes: Header, num_inputs: int, group: int | None) -> int:
    """Return the number of groups of a weight.

    Args:
        codes: of the weight, for messages.
        num_inputs: of the weight.
        group: inputs of a group; None = all.

    Raises:
        ValueError: groups do not divide the inputs.
    """
    size = num_inputs if group is None else group
    if num_inputs % size:
        raise codes.refused(f"with inputs in whole groups of {size}", f"{num_inputs} inputs")
    return num_inputs // size


def checked_groups(index: torch.Tensor, header: Header, count: int) -> torch.Tensor:
    """Return the group of each input; ValueError for no such group, or groups of several sizes."""
    least, most = int(index.min()), int(index.max())
    if least < 0 or most >= count:
        raise header.refused(f"with groups from 0 to {count - 1}", f"{least} to {most}")
    sizes = index.bincount(minlength=count)
    if bool((sizes != len(index) // count).any()):
        raise header.refused(
            f"with {len(index) // count} inputs in each group", f"{int(sizes.min())} to {int(sizes.max())}"
        )
    return index.long()


def _whole_words(header: Header, num_codes: int, bits: int) -> int:
    if num_codes * bits % WORD:
        raise header.refused(f"with outputs in whole words of {WORD // bits} codes", f"{num_codes} outputs")
    return num_codes * bits // WORD


def _check_index(index: Header | None, num_inputs: int) -> None:
    if index is not None:
        index.need_dtype("I32", "I64")
        index.need_shape((num_inputs,), why="a group for each input")


@dataclass(frozen=True)
class PackedInt:
    """compressed-tensors: words along the inputs of an output, zero points along the outputs.

    Attributes:
        bits: of a code.
        group: inputs of a group; None = all.
        is_symmetric: whether the middle code is 0, without zero points.
        is_sorted: whether inputs of a group are neighbours, unless there is an index.
    """

    bits: int
    group: int | None
    is_symmetric: bool = True
    is_sorted: bool = True

    name = "packed int"

    @property
    def leaves(self) -> Mapping[str, bool]:
        """Ends of the names of the tensors of a weight, and whether they must be there."""
        return MappingProxyType(
            {
                "weight_packed": True,
                "weight_scale": True,
                "weight_shape": True,
                "weight_zero_point": not self.is_symmetric,
                "weight_g_idx": not self.is_sorted,
            }
        )

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, ...]:
        """Return the shape of the weight."""
        codes, sizes = headers["weight_packed"], headers["weight_shape"]
        codes.need_dtype("I32")
        codes.need_dims(2)
        sizes.need_dtype("I64", "I32")
        sizes.need_shape((2,))
        num_outputs, num_inputs = (int(size) for size in sizes.read())
        if min(num_outputs, num_inputs) < 1:
            raise sizes.refused("to be two sizes of at least 1", [num_outputs, num_inputs])
        wanted = (num_outputs, -(-num_inputs * self.bits // WORD))
        codes.need_shape(wanted, why=f"{self.bits} bits of a weight {[num_outputs, num_inputs]}")
        count = num_groups(codes, num_inputs, self.group)
        headers["weight_scale"].need_dtype(*FLOATS)
        headers["weight_scale"].need_shape((num_outputs, count), why="a scale for each output and group")
        if (zero := headers.get("weight_zero_point")) is not None:
            zero.need_dtype("I32", "I8")
            rows = num_outputs if zero.dtype == "I8" else -(-num_outputs * self.bits // WORD)
            zero.need_shape((rows, count), why=f"zero points of {num_outputs} outputs and {count} groups")
        _check_index(headers.get("weight_g_idx"), num_inputs)
        return num_outputs, num_inputs

    def read(self, tensors: Mapping[str, torch.Tensor], headers: Mapping[str, Header]) -> QuantisedWeight:
        """Return the weight."""
        num_outputs, num_inputs = self.shape(headers)
        codes = unpack(tensors["weight_packed"], self.bits)[:, :num_inputs]
        scales, index = tensors["weight_scale"], tensors.get("weight_g_idx")
        group_of = None
        # -1 everywhere is an index that was never used.
        if index is not None and (not self.is_sorted or int(index.max()) >= 0):
            group_of = checked_groups(index, headers["weight_g_idx"], scales.shape[1])
        return weight_of(codes, self.bits, scales, self._zeros(tensors, headers, num_outputs), group_of)

    def _zeros(
        self, tensors: Mapping[str, torch.Tensor], headers: Mapping[str, Header], num_outputs: int
    ) -> torch.Tensor | int:
        import torch  # Slow to import, and not needed by plans.

        middle, stored = 1 << (self.bits - 1), tensors.get("weight_zero_point")
        if stored is None:
            return middle
        zeros = (stored.short() + middle).to(torch.uint8)
        if headers["weight_zero_point"].dtype != "I8":
            zeros = unpack(stored.t(), self.bits).t()[:num_outputs]
        if self.is_symmetric and bool((zeros != middle).any()):
            raise headers["weight_zero_point"].refused("to be 0 in a symmetric encoding", "other zero points")
        return zeros


@dataclass(frozen=True)
class GPTQInt:
    """GPTQ: words along the inputs, and zero points along the outputs, of the weight turned round.

    Attributes:
        bits: of a code.
        group: inputs of a group; None = all.
        is_symmetric: whether zero points are the middle code.
        is_sorted: whether inputs of a group are neighbours.
        is_less_one: whether stored zero points are one less than those of the weight (version 1), as far as
            a symmetric encoding does not show it itself.
    """

    bits: int
    group: int | None
    is_symmetric: bool
    is_sorted: bool
    is_less_one: bool

    name = "gptq"

    @property
    def leaves(self) -> Mapping[str, bool]:
        """Ends of the names of the tensors of a weight, and whether they must be there."""
        return MappingProxyType(
            {"qweight": True, "qzeros": True, "scales": True, "g_idx": not self.is_sorted}
        )

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, ...]:
        """Return the shape of the weight."""
        codes, scales = headers["qweight"], headers["scales"]
        codes.need_dtype("I32")
        codes.need_dims(2)
        num_inputs, num_outputs = codes.shape[0] * WORD // self.bits, codes.shape[1]
        count = num_groups(codes, num_inputs, self.group)
        scales.need_dtype(*FLOATS)
        scales.need_shape(
            (count, num_outputs), why=f"qweight {list(codes.shape)} of {self.bits} bits by gptq"
        )
        headers["qzeros"].need_dtype("I32")
        headers["qzeros"].need_shape((count, _whole_words(codes, num_outputs, self.bits)))
        _check_index(headers.get("g_idx"), num_inputs)
        return num_outputs, num_inputs

    def read(self, tensors: Mapping[str, torch.Tensor], headers: Mapping[str, Header]) -> QuantisedWeight:
        """Return the weight."""
        _, num_inputs = self.shape(headers)
        scales, group_of = tensors["scales"], None
        if (index := tensors.get("g_idx")) is not None:
            group_of = checked_groups(index, headers["g_idx"], len(scales))
            neighbours = group_of.new_tensor(range(num_inputs)) // (num_inputs // len(scales))
            if bool((group_of == neighbours).all()):
                group_of = None
            elif self.is_sorted:
                raise headers["g_idx"].refused("in order, since desc_act is false", "another order")
        codes = unpack(tensors["qweight"].t(), self.bits)
        zeros = self._zeros(unpack(tensors["qzeros"], self.bits), headers["qzeros"])
        return weight_of(codes, self.bits, scales.t(), zeros.t(), group_of)

    def _zeros(self, stored: torch.Tensor, header: Header) -> torch.Tensor:
        """Return the zero points of the weight; files of one version may have those of the other."""
        middle, is_less_one = 1 << (self.bits - 1), self.is_less_one
        if self.is_symmetric:
            found = stored.unique().tolist()
            if found not in ([middle - 1], [middle]):
                raise header.refused(f"to be {middle - 1} or {middle}, since sym is true", found[:5])
            is_less_one = found == [middle - 1]
        # The largest code plus one is 0 again.
        return (stored + 1).bitwise_and_((1 << self.bits) - 1) if is_less_one else stored


@dataclass(frozen=True)
class AWQInt:
    """AWQ (gemm): words of 4 bits along the outputs, out of order, of the weight turned round.

    Attributes:
        group: inputs of a group; None = all.
    """

    group: int | None

    name = "awq"
    leaves = MappingProxyType({"qweight": True, "qzeros": True, "scales": True})

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, ...]:
        """Return the shape of the weight."""
        codes, scales = headers["qweight"], headers["scales"]
        codes.need_dtype("I32")
        codes.need_dims(2)
        num_inputs, num_outputs = codes.shape[0], codes.shape[1] * len(_AWQ_ORDER)
        count = num_groups(codes, num_inputs, self.group)
        scales.need_dtype(*FLOATS)
        scales.need_shape((count, num_outputs), why=f"qweight {list(codes.shape)} by awq")
        headers["qzeros"].need_dtype("I32")
        headers["qzeros"].need_shape((count, codes.shape[1]))
        return num_outputs, num_inputs

    def read(self, tensors: Mapping[str, torch.Tensor], headers: Mapping[str, Header]) -> QuantisedWeight:
        """Return the weight."""
        self.shape(headers)
        codes, zeros = (unpack(tensors[name], 4, _AWQ_ORDER).t() for name in ("qweight", "qzeros"))
        return weight_of(codes, 4, tensors["scales"].t(), zeros, None)

"""Linear layers for decoding on CPU in bfloat16: packed once, or read in place, and joined."""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from graphs.backends.trace import Call, Value
from hpu_duo.modeling.attention import LiveRows
from kernels_ref.x86 import linear
from kernels_ref.x86 import linear as panels

_ALIGNMENT = 64


class HugePages:
    """One range of memory in huge pages, handed out piece by piece.

    Where the system gives huge pages to those who ask (the usual setting "madvise"), reading weights from
    them is a tenth to a third faster than from ordinary pages. Where it gives none, it is ordinary memory.
    Pages are taken when they are first written, so a range costs nothing before.

    Args:
        num_bytes: of all pieces together, each rounded up by ``rounded``.

    Raises:
        MemoryError: the system does not give such a range.
    """

    def __init__(self, num_bytes: int) -> None:
        try:
            self._memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"expected room for {num_bytes:,} bytes of packed weights: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # A kernel built without them.
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._num_taken = 0

    @staticmethod
    def rounded(num_bytes: int) -> int:
        """Bytes that a piece takes."""
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next piece, as zeros. It keeps the range alive.

        Raises:
            ValueError: less is left than the piece takes.
        """
        count = 1
        for size in shape:
            count *= size
        size = self.rounded(count * dtype.itemsize)
        left = len(self._memory) - self._num_taken
        if size > left:
            raise ValueError(f"expected a piece of at most {left} bytes, got {size}")
        piece = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._num_taken)
        self._num_taken += size
        return piece.view(shape)


_library = torch.library.Library("hpu_duo", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor")


def _packed_linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int
) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


def _packed_linear_fake(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


# The weight is an opaque oneDNN tensor, so the call carries both dispatch keys.
_library.impl("packed_linear", _packed_linear, "CPU")
_library.impl("packed_linear", _packed_linear, "MkldnnCPU")
torch.library.register_fake("hpu_duo::packed_linear", _packed_linear_fake, lib=_library)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN multiplies packed weights of ``dtype``."""
    mkldnn = torch.backends.mkldnn.is_available()
    return mkldnn and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class PanelLinear(nn.Module):
    """``nn.Linear`` for inference, with the weight in panels for our kernel.

    Takes ``[..., F]``, ``F`` being ``in_features``. With ``live``, an input ``[1, T, F]`` with as many rows
    as the step's bucket (query tokens; for the head, rows of logits) must hold those of the step in order,
    padding last: padding gives 0. Of any other shape, every row is computed.

    Args:
        memory: receives the panels; see ``num_bytes``.
        live: int32 ``[2]`` of ``LiveRows``, or None to compute every row.
    """

    packed: torch.Tensor
    bias: torch.Tensor | None
    live: torch.Tensor | None

    def __init__(self, linear: nn.Linear, memory: HugePages, live: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        packed = panels.pack(weight, memory.take(panels.packed_shape(*weight.shape), weight.dtype))
        bias = None if linear.bias is None else panels.pack_bias(linear.bias.detach())
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.register_buffer("live", live, persistent=False)

    @staticmethod
    def num_bytes(linear: nn.Linear) -> int:
        """Bytes of the packed weight."""
        return HugePages.rounded(
            math.prod(panels.packed_shape(*linear.weight.shape)) * linear.weight.dtype.itemsize
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Only [1, tokens, features] has the tokens of the step in their order.
        live = self.live if x.dim() == 3 and x.shape[0] == 1 else None
        # ``panels.multiply`` without its check, which ``panels.fits`` has made.
        operator = torch.ops.hpu_duo_x86.linear.default
        return operator(x, self.packed, self.bias, self.out_features, live, "best")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, in panels"


class PackedLinear(nn.Module):
    """``nn.Linear`` for inference, with the weight in oneDNN's own layout."""

    packed: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous())
        self.register_buffer("packed", packed, persistent=False)
        # A view would keep the whole file that the bias was read from.
        bias = None if linear.bias is None else linear.bias.detach().clone()
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.hpu_duo.packed_linear(x, self.packed, self.bias, self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, packed"


class VectorLinear(nn.Module):
    """``nn.Linear`` that a compiled step of one token turns into a plain sum of products.

    The compiler makes one pass over the weight of it, which reads memory faster than oneDNN does
    for a single row. Longer steps, and steps that are not compiled, take the ordinary product.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() != x.shape[-1] or not torch.compiler.is_compiling():
            return nn.functional.linear(x, self.weight, self.bias)
        y = (x.flatten().float() * self.weight.float()).sum(dim=-1)
        if self.bias is not None:
            y = y + self.bias.float()
        return y.to(x.dtype).view(*x.shape[:-1], -1)


def pack_linears(
    model: nn.Module,
    *,
    vector: Collection[nn.Module] = (),
    head: nn.Module | None = None,
    live: LiveRows | None = None,
) -> int:
    """Replace every bfloat16 ``nn.Linear`` of the model in place; returns their number.

    A weight shared with the embedding table stays there for look-ups and is packed beside it.

    Args:
        vector: modules whose linears become ``VectorLinear`` instead of being packed for oneDNN.
        head: the linear that gets rows of logits; all others get query tokens.
        live: numbers of rows that are not padding.
    """
    as_vectors = {id(module) for parent in vector for module in parent.modules()}
    # Names only: a list of the layers themselves would keep all plain weights until the end.
    targets = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear and can_pack(child.weight.dtype)
    ]
    linears = (getattr(module, name) for module, name in targets)
    memory = HugePages(sum(PanelLinear.num_bytes(x) for x in linears if panels.fits(x.weight)))
    for module, name in targets:
        child = getattr(module, name)
        packed: nn.Module
        if panels.fits(child.weight):
            rows = None if live is None else live.logits if child is head else live.tokens
            packed = PanelLinear(child, memory, rows)
        else:
            packed = VectorLinear(child) if id(child) in as_vectors else PackedLinear(child)
        setattr(module, name, packed)
    return len(targets)


_Place = tuple[int, tuple[int, ...], tuple[int, ...]]


def plain_bytes(model: nn.Module) -> int:
    """Bytes of the weights that checkpoints have, as far as the model still holds them; shared ones once."""
    return sum(x.nbytes for x in _by_place(_weights(model)).values())


def leave_files(model: nn.Module, packed_bytes: int) -> int:
    """Copy the plain weights of a packed model to memory of their own, in place; returns the bytes copied.

    A checkpoint is mapped as a whole, and one small weight that is left in it keeps all its pages, those of
    weights which have been packed among them. Nothing is copied where more is left than was packed.
    Weights that share memory share it after it.

    Args:
        packed_bytes: by which packing has reduced ``plain_bytes``.
    """
    weights = _weights(model)
    mine = _by_place(weights)
    if sum(x.nbytes for x in mine.values()) > packed_bytes:
        return 0
    copies = {place: x.detach().clone() for place, x in mine.items()}
    for tensor in weights:
        tensor.data = copies[_place(tensor)]
    return sum(copy.nbytes for copy in copies.values())


def _weights(model: nn.Module) -> list[torch.Tensor]:
    # A weight that modules share has several names.
    named = model.state_dict(keep_vars=True).values()
    return [*{id(x): x for x in named if isinstance(x, torch.Tensor)}.values()]


def _by_place(tensors: Iterable[torch.Tensor]) -> dict[_Place, torch.Tensor]:
    return {_place(x): x for x in tensors}


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


_Key = tuple[Any, ...]


def join_linears(calls: Sequence[Call]) -> list[Call]:
    """Return the same step with one call of our kernel for all its products with the same inputs.

    Results come where the first of them was. Between the first and the last nothing writes to memory.

    Args:
        calls: the trace.
    """
    joined: list[list[Call]] = []
    open_groups: dict[_Key, list[Call]] = {}
    for call in calls:
        key = _key(call)
        if key is None:
            joined.append([call])
            if call.writes is not False:
                open_groups.clear()
        elif key in open_groups:
            open_groups[key].append(call)
        else:
            open_groups[key] = [call]
            joined.append(open_groups[key])
    return [group[0] if len(group) == 1 else _joint(group) for group in joined]


def _key(call: Call) -> _Key | None:
    """Return what products that can be joined have in common; None if this call is no such product."""
    if str(call.func) != linear.NAME or call.kwargs:
        return None
    x, packed, bias, _, *others = call.args
    made_in_step = (value for value in (packed, bias) if isinstance(value, Value) and value.is_variable)
    return None if any(made_in_step) else (x, *others)


def _joint(group: Sequence[Call]) -> Call:
    x, _, _, _, *others = group[0].args
    packed, biases, sizes = ([call.args[place] for call in group] for place in (1, 2, 3))
    results = tuple(result for call in group for result in call.results)
    return Call(linear.each_operator(), (x, packed, biases, sizes, *others), {}, results, is_one=False)

"""Linear layers for decoding on CPU: packed once, or read in place, and joined."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphs.backends.trace import Call, Value
from hpu_duo.modeling.attention import LiveRows
from hpu_duo.modeling.experts import PanelExperts, stacked_weights
from hpu_duo.modeling.quantised.linear import QuantisedLinear
from hpu_duo.modeling.quantised.panels import Int8PanelLinear, PanelQuantisedLinear, multiplies_int8
from hpu_duo.modeling.quantised.panels import fits as fits_codes
from hpu_duo.modeling.quantised.state import quantised_layers
from kernels_ref.x86 import int8, library, linear
from kernels_ref.x86 import linear as panels
from kernels_ref.x86 import quantised as codes

_ALIGNMENT = 64


class HugePages:
    """An arena in huge pages.

    If the system has huge pages on request (the usual setting "madvise"), reading weights from them is a
    tenth to a third faster than from ordinary pages. Otherwise it is ordinary memory. Pages are allocated at
    their first write.

    Args:
        num_bytes: of all pieces together, each rounded up by ``rounded``.

    Raises:
        MemoryError: the system has no such range of addresses.
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
        """Allocated bytes of a piece."""
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next piece, as zeros. It has a reference to the arena.

        Raises:
            ValueError: the arena is too small for the piece.
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


def can_pack(dtype: torch.dtype, arithmetic: torch.dtype | None = None) -> bool:
    """Whether weights of ``dtype`` can be packed on this machine, for our kernels or in bfloat16 for oneDNN.

    Args:
        arithmetic: dtype of the inputs of linears; None = ``dtype``, and float32 weights stay plain.
    """
    if arithmetic == torch.float32:
        return library.serves(dtype, arithmetic)
    mkldnn = torch.backends.mkldnn.is_available()
    return mkldnn and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def is_native(dtype: torch.dtype) -> bool:
    """Whether this x86 CPU packs weights of ``dtype`` and has instructions for their products."""
    return can_pack(dtype) and torch.cpu._is_avx512_bf16_supported()


class PanelLinear(nn.Module):
    """``nn.Linear`` for inference, with the weight in panels for our kernel.

    Inputs are ``[..., F]``, ``F`` being ``in_features``. With ``live``, an input ``[1, T, F]`` with as many
    rows as the step's bucket (query tokens; for the head, rows of logits) must have those of the step in
    order, padding last: results of padding are 0. Of any other shape, every row is computed.

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
        shape = panels.packed_shape(self.out_features, self.in_features, weight.dtype)
        packed = panels.pack(weight, memory.take(shape, weight.dtype))
        bias = None if linear.bias is None else panels.pack_bias(linear.bias.detach())
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.register_buffer("live", live, persistent=False)

    @staticmethod
    def num_bytes(linear: nn.Linear) -> int:
        """Bytes of the packed weight."""
        shape = panels.packed_shape(linear.out_features, linear.in_features, linear.weight.dtype)
        return HugePages.rounded(math.prod(shape) * linear.weight.dtype.itemsize)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PanelLinear:
        """Leave the buffers as they are: panels are stored in the dtype of the checkpoint, whatever their
        inputs are."""
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Only [1, tokens, features] has the tokens of the step in their order.
        live = self.live if x.dim() == 3 and x.shape[0] == 1 else None
        # ``panels.multiply`` without the check of ``panels.fits``, which precedes it.
        operator = torch.ops.hpu_duo_x86_v3.linear.default
        return operator(x, self.packed, self.bias, self.out_features, live)

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
        # A view would keep the whole mapped file alive.
        bias = None if linear.bias is None else linear.bias.detach().clone()
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.hpu_duo.packed_linear(x, self.packed, self.bias, self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, packed"


class VectorLinear(nn.Module):
    """``nn.Linear`` that is a plain sum of products in a compiled step of one token.

    The compiler generates one pass over the weight, which reads memory faster than oneDNN does for a single
    row. Longer steps, and uncompiled steps, use the ordinary product.
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
    arithmetic: torch.dtype | None = None,
    experts: bool = False,
) -> int:
    """Replace linear layers that can be packed in place, plain or of codes; returns their number.

    A weight shared with the embedding table is packed in addition.

    Args:
        vector: modules with linears to replace by ``VectorLinear`` instead of packing for oneDNN.
        head: the linear with rows of logits as input; all others have query tokens.
        live: numbers of rows that are not padding.
        arithmetic: dtype of the inputs of linears; None = that of their weights.
        experts: whether to pack weights of all experts in one tensor as well, for our kernels; float32 ones
            whatever ``arithmetic`` is.
    """
    as_vectors = {id(module) for parent in vector for module in parent.modules()}
    inputs = arithmetic or next(model.parameters()).dtype
    # Names only: a list of the layers themselves would keep all plain weights alive until the end.
    targets = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if _can_pack(child, arithmetic, inputs)
    ]
    if arithmetic == torch.float32 and not library.is_available(arithmetic):
        return 0
    linears = (getattr(module, name) for module, name in targets)
    stacks = [*_stacks(model, arithmetic)] if experts else []
    bytes_of_stacks = (PanelExperts.num_bytes(getattr(*each), each[0].is_transposed) for each in stacks)
    memory = HugePages(
        sum(_panel_bytes(each, arithmetic) for each in linears) + sum(map(HugePages.rounded, bytes_of_stacks))
    )
    files = _FilePages(model)
    for module, name in stacks:
        files.unmap()
        weight = getattr(module, name)
        delattr(module, name)
        setattr(module, name, PanelExperts(weight, module.is_transposed, memory))
        del weight
    for module, name in targets:
        files.unmap()
        child = getattr(module, name)
        packed: nn.Module
        rows = None if live is None else live.logits if child is head else live.tokens
        if isinstance(child, QuantisedLinear):
            packed = _kind_of(child)(child, memory, rows)
        elif panels.fits(child.weight, arithmetic):
            packed = PanelLinear(child, memory, rows)
        else:
            packed = VectorLinear(child) if id(child) in as_vectors else PackedLinear(child)
        setattr(module, name, packed)
    files.unmap()
    return len(targets)


class _FilePages:
    """Mapped files of a model's weights; mappings with a written page are left out.

    Pages that were read stay resident with their file, so packing would hold each weight twice. Files stay
    mapped as long as this object lives: other memory may get the address of one that is no longer mapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._mapped: list[torch.UntypedStorage] = []
        path = Path("/proc/self/smaps")
        self._madvise = getattr(ctypes.CDLL(None), "madvise", None) if path.is_file() else None
        if self._madvise is None:
            return
        storages = {x.data_ptr(): x.untyped_storage() for x in _weights(model) if x.device.type == "cpu"}
        places = sorted(storages)
        begin = end = 0
        is_clean = False
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, *rest = line.split(maxsplit=5)
            if not name.endswith(":"):  # the range, and an inode that is 0 without a file
                begin, end = (int(x, 16) if rest[3] != "0" else 0 for x in name.split("-"))
            elif name == "Anonymous:":
                is_clean = rest[0] == "0"
            elif name == "Swap:" and is_clean and rest[0] == "0":
                first = bisect_left(places, begin)
                if first < len(places) and places[first] < end:
                    self._ranges.append((begin, end - begin))
                    self._mapped += (storages[x] for x in places[first : bisect_left(places, end)])

    def unmap(self) -> None:
        """Let go of all pages; those that are read again come back from the system's cache."""
        for begin, size in self._ranges:
            assert self._madvise is not None, "ranges are found where there is a system call"
            self._madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _stacks(model: nn.Module, arithmetic: torch.dtype | None) -> Iterator[tuple[Any, str]]:
    """Yield modules of experts and the names of weights that can be packed, as plain linears would be."""
    for module in model.modules():
        for name in stacked_weights(module):
            weight = getattr(module, name)
            dtype = torch.float32 if weight.dtype == torch.float32 else arithmetic
            if can_pack(weight.dtype, dtype) and panels.fits(weight, dtype):
                yield module, name


def _can_pack(child: nn.Module, arithmetic: torch.dtype | None, inputs: torch.dtype) -> bool:
    if isinstance(child, QuantisedLinear):
        can = multiplies_int8(child, inputs) if child.activations else fits_codes(child.stored, inputs)
        return child.codes.device.type == "cpu" and can
    return type(child) is nn.Linear and can_pack(child.weight.dtype, arithmetic)


def _kind_of(layer: QuantisedLinear) -> type[PanelQuantisedLinear | Int8PanelLinear]:
    return PanelQuantisedLinear if layer.activations is None else Int8PanelLinear


def _panel_bytes(linear: nn.Module, arithmetic: torch.dtype | None) -> int:
    if isinstance(linear, QuantisedLinear):
        return HugePages.rounded(_kind_of(linear).num_bytes(linear))
    assert isinstance(linear, nn.Linear), "others are not packed"
    return PanelLinear.num_bytes(linear) if panels.fits(linear.weight, arithmetic) else 0


_Place = tuple[int, tuple[int, ...], tuple[int, ...]]


def plain_bytes(model: nn.Module) -> int:
    """Bytes of the checkpoint's weights that the model still references; shared ones once."""
    return sum(x.nbytes for x in _by_place(_weights(model)).values())


def code_bytes(model: nn.Module, plain: torch.dtype | None) -> int:
    """Bytes that the codes of a model have in its checkpoint, before they are packed.

    Args:
        plain: dtype of the weights there, if they were plain ones and rounded.
    """
    layers = quantised_layers(model).values()
    if plain is not None:
        return sum(each.in_features * each.out_features for each in layers) * plain.itemsize
    return sum(each.codes.nbytes for each in layers)


def return_memory() -> None:
    """Free objects in cycles, and return free memory to the system where the C library can (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def leave_files(model: nn.Module, packed_bytes: int) -> int:
    """Copy the plain weights of a packed model to memory of their own, in place; returns the bytes copied.

    A checkpoint is mapped as a whole, and one remaining small weight keeps all its pages mapped, those of
    packed weights included. Nothing is copied where more is left than was packed. Weights that share memory
    share it after it.

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

    Results replace the first of them. Between the first and the last nothing writes to memory.

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
        elif len(open_groups.get(key, ())) in range(1, linear.MOST_WEIGHTS):
            open_groups[key].append(call)
        else:
            open_groups[key] = [call]
            joined.append(open_groups[key])
    return [group[0] if len(group) == 1 else _joint(group) for group in joined]


def _key(call: Call) -> _Key | None:
    """Return what products that can be joined have in common; None if this call is no such product."""
    own = _OWN_ARGUMENTS.get(str(call.func))
    if own is None or call.kwargs:
        return None
    x, *rest = call.args
    made_in_step = (value for value in rest[:own] if isinstance(value, Value) and value.is_variable)
    return None if any(made_in_step) else (str(call.func), x, *rest[own:])


def _joint(group: Sequence[Call]) -> Call:
    name = str(group[0].func)
    x, *rest = group[0].args
    own = _OWN_ARGUMENTS[name]
    owns = [call.args[place] for place in range(1, own + 1) for call in group]
    results = tuple(result for call in group for result in call.results)
    return Call(_EACH[name](len(group)), (x, *owns, *rest[own:]), {}, results, is_one=False)


_OWN_ARGUMENTS = {linear.NAME: 3, codes.NAME: 6, int8.NAME: 5}
"""Operators that have one for several weights, and how many of their arguments each weight has."""
_EACH = {
    linear.NAME: linear.each_operator,
    codes.NAME: codes.each_operator,
    int8.NAME: int8.each_operator,
}
"""Functions that return the operator for several weights."""


class StoredEmbedding(nn.Module):
    """An embedding table in the dtype of the checkpoint, for activations of another one.

    Args:
        table: its weight is not copied.
        arithmetic: dtype of the results.
    """

    weight: torch.Tensor

    def __init__(self, table: nn.Embedding, arithmetic: torch.dtype) -> None:
        super().__init__()
        # No parameter: transformers takes the dtype of the first one for that of the model.
        self.register_buffer("weight", table.weight.detach())
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self._arithmetic = arithmetic

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Look up token ids ``[...]``: ``[..., hidden]``."""
        return nn.functional.embedding(input_ids, self.weight).to(self._arithmetic)

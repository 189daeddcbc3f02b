"""Linear layers for decoding on CPU: packed once, or read in place, and joined.

Norms and rotary embeddings by the fused operators of Gaudi's software are here too.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import math
import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

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
        experts: whether to pack weights of all experts in one tensor as well, for our kernels.
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
    for module, name in stacks:
        weight = getattr(module, name)
        delattr(module, name)
        setattr(module, name, PanelExperts(weight, module.is_transposed, memory))
        del weight
    for module, name in targets:
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
    return len(targets)


def _stacks(model: nn.Module, arithmetic: torch.dtype | None) -> Iterator[tuple[Any, str]]:
    """Yield modules of experts and the names of weights that can be packed."""
    for module in model.modules():
        for name in stacked_weights(module):
            if panels.fits(getattr(module, name), arithmetic):
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


_ROTATE = "apply_rotary_pos_emb"
_EPSILONS = ("variance_epsilon", "eps")
_NORM, _ROTARY = "rms_norm", "rotary_pos_embedding"

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]
_turning: dict[type[nn.Module], type[nn.Module]] = {}


class FusedRMSNorm(nn.Module):
    """Replacement of a norm's class: ``x / rms(x) * weight`` in one operator."""

    weight: nn.Parameter
    fused_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise ``[..., D]``."""
        return fused_norm(hidden_states, self.weight, self.fused_epsilon)


def fused_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return ``x / rms(x) * weight``. Source: the bridge's ``FusedRMSNorm``."""
    normed: torch.Tensor = torch.ops.hpu.rms_norm(x, weight, epsilon)[0]
    return normed


def fused_rotation(x_BHQD: torch.Tensor, cos_B1QD: torch.Tensor, sin_B1QD: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of numbers that are half a head apart. Source: the bridge's ``apply_rotary_pos_emb``."""
    turned: torch.Tensor = torch.ops.hpu.rotary_pos_embedding(x_BHQD, sin_B1QD, cos_B1QD, None, 0, 0)
    return turned


@torch.inference_mode()
def fuse_modules(model: nn.Module, attentions: Iterable[nn.Module], device: torch.device) -> tuple[str, ...]:
    """Let a model run fused operators where they are what its own code is.

    Args:
        model: on the host still; its norms and attention modules change their class.
        device: which the operators have to pass a trial on.
    Returns:
        What was replaced.
    """
    found = ((module, _Norm.of(module)) for module in model.modules())
    norms = [(module, norm) for module, norm in found if norm is not None]
    good = {norm for norm in {norm for _, norm in norms} if norm.passes(device)}
    norms = [(module, norm) for module, norm in norms if norm in good]
    for module, norm in norms:
        vars(module).update(fused_epsilon=norm.epsilon)
        module.__class__ = FusedRMSNorm
    dtype = next(model.parameters()).dtype
    rotating = [each for each in attentions if _rotates_plainly(type(each))]
    if rotating and not _rotation_passes(dtype, device):
        rotating = []
    for module in rotating:
        module.__class__ = _with_fused_rotation(type(module))
    counts = ((len(norms), "norms"), (len(rotating), "rotary embeddings"))
    return tuple(f"{number} {what}" for number, what in counts if number)


class _Norm(NamedTuple):
    """Parameters of a norm with the plain formula."""

    width: int
    dtype: torch.dtype
    epsilon: float

    @classmethod
    def of(cls, module: nn.Module) -> _Norm | None:
        """Return the norm of a module: with one input tensor, one weight vector, and equal results of its own
        code."""
        weight, epsilon = getattr(module, "weight", None), _epsilon(module)
        named = [name for name, _ in module.named_parameters()]
        if named != ["weight"] or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
            return None
        if epsilon is None or len(inspect.signature(module.forward).parameters) != 1:
            return None
        x = _numbers(1, 3, len(weight), seed=0).to(weight.dtype) + 0.5
        is_plain = _is_close(module(x), _normed(x, weight, epsilon))
        return cls(len(weight), weight.dtype, epsilon) if is_plain else None

    def passes(self, device: torch.device) -> bool:
        """Whether the operator computes it there."""
        weight = _numbers(self.width, seed=1).to(self.dtype)
        tensors = [_numbers(1, 5, *heads, self.width, seed=2).to(self.dtype) * 3 for heads in ((), (3,))]
        return all(
            _passes(
                _NORM,
                partial(fused_norm, epsilon=self.epsilon),
                _normed(x, weight, self.epsilon),
                x,
                weight,
                on=device,
            )
            for x in tensors
        )


def _epsilon(module: nn.Module) -> float | None:
    found = (getattr(module, name, None) for name in _EPSILONS)
    return next((value for value in found if isinstance(value, float)), None)


def _normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    scale = torch.rsqrt(x.double().square().mean(dim=-1, keepdim=True) + epsilon)
    return (x.double() * scale * weight.double()).to(x.dtype)


# Rotary embeddings


def _rotates_plainly(attention: type[nn.Module]) -> bool:
    """Whether ``forward`` of a class calls a function of the expected name with the plain formula."""
    forward = inspect.unwrap(attention.forward)
    rotate = _rotate_of(forward)
    if rotate is None:
        return False
    q, k, cos, sin = _turned(torch.float32)
    try:
        found = rotate(q, k, cos, sin)
    except (RuntimeError, TypeError, ValueError):
        return False
    return all(_is_close(got, _rotation(x, cos, sin)) for got, x in zip(found, (q, k)))


def _rotate_of(forward: object) -> Rotate | None:
    if not isinstance(forward, FunctionType) or _ROTATE not in forward.__code__.co_names:
        return None
    found: Rotate | None = forward.__globals__.get(_ROTATE)
    return found


def _with_fused_rotation(attention: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass with the same ``forward`` code and another function of that name."""
    if attention in _turning:
        return _turning[attention]
    forward = inspect.unwrap(attention.forward)
    assert isinstance(forward, FunctionType), f"expected {attention} with a known rotation"
    plain = forward.__globals__[_ROTATE]

    def rotate(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if args or kwargs or q.shape[-1] != cos.shape[-1]:
            turned: tuple[torch.Tensor, torch.Tensor] = plain(q, k, cos, sin, *args, **kwargs)
            return turned
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return fused_rotation(q, cos, sin), fused_rotation(k, cos, sin)

    names = {**forward.__globals__, _ROTATE: rotate}
    same = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    same.__kwdefaults__ = forward.__kwdefaults__
    _turning[attention] = type(f"Fused{attention.__name__}", (attention,), {"forward": same})
    return _turning[attention]


def _turned(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries and keys ``[1, H, Q, D]``, and cosines and sines ``[1, Q, D]`` of repeated angles."""
    q, k = _numbers(1, 4, 5, 16, seed=3).to(dtype), _numbers(1, 2, 5, 16, seed=4).to(dtype)
    angles = _numbers(1, 5, 8, seed=5).repeat(1, 1, 2)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def _rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.double().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.double() * cos.double()[:, None] + turned * sin.double()[:, None]).to(x.dtype)


def _rotation_passes(dtype: torch.dtype, device: torch.device) -> bool:
    q, k, cos, sin = _turned(dtype)
    waves = cos[:, None], sin[:, None]
    return all(_passes(_ROTARY, fused_rotation, _rotation(x, cos, sin), x, *waves, on=device) for x in (q, k))


# Trials


def _numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _passes(
    name: str,
    run: Callable[..., torch.Tensor],
    expected: torch.Tensor,
    *args: torch.Tensor,
    on: torch.device,
) -> bool:
    """Whether an operator exists, runs, and returns the expected result."""
    if not hasattr(torch.ops.hpu, name):
        return False
    try:
        return _is_close(run(*(x.to(on) for x in args)).cpu(), expected)
    except (RuntimeError, TypeError, ValueError):
        return False


def _is_close(got: object, expected: torch.Tensor) -> bool:
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    allowed = 8 * torch.finfo(expected.dtype).eps
    return bool(torch.isclose(got.double(), expected.double(), rtol=allowed, atol=allowed).all())

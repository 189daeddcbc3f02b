"""Linear layers for decoding on CPU in bfloat16: packed once, or read in place.

A plain ``F.linear`` on CPU lays the weight out anew in every call. For one token that is most of
the time of a decode step, because a decode reads every weight once and does little else. Weights are
packed for our own kernel where the CPU has AVX512-BF16, elsewhere for oneDNN. Our kernel leaves
out the rows that only pad a step to its bucket.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import nn

from hpu_duo.modeling.huge_pages import HugePages
from hpu_duo.modeling.live_rows import LiveRows
from kernels_ref.x86 import linear as panels

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

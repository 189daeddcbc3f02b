"""Mixtures of experts with shapes that do not depend on the routing.

Shapes: T tokens, k experts of each, E experts, X of them (or of their copies) at a time, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpu_duo.modeling.transformers_internals import EXPERTS
from kernels_ref.x86 import linear as panels

if TYPE_CHECKING:
    from hpu_duo.modeling.quantised.panels import Arena

NAME = "hpu_duo"

NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names, in configurations, of the number of routed experts."""

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""Names of the number of them that a token uses."""

HELD = "num_held_experts"
"""Name, in the configuration of a rank's shard, of its number of whole experts."""

GROUP_BYTES = 256 << 20
"""Bound on the intermediates of the experts that run together; a smaller one means more launches."""

HPU_GROUP_BYTES = 2 << 30
"""The same on an HPU, as far as it takes to run in ``MOST_GROUPS`` groups."""

MOST_GROUPS = 4
"""Most groups of experts in the graph of a layer on an HPU, each of some 30 nodes, if their bound allows."""

_FLOAT32 = 4
_PASSES_OF_A_COPY = 3
"""Passes over gathered weights: they are read, written, and read again."""

Pick = Callable[[torch.Tensor], torch.Tensor]


def register_experts() -> str | None:
    """Register ``run_experts`` with transformers, and return its name; None before transformers 5."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return None
    ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)
    return NAME


def adapt_loops(model: Any) -> int:
    """Let experts that run in a loop over the chosen ones run by ``run_experts``; return their number.

    Experts behind those of ``down_proj`` have no weights, and their outputs are their inputs. Modules whose
    own code has other results keep it.
    """
    if getattr(model.config, EXPERTS, None) != NAME:
        return 0
    found = [module for module in model.modules() if _is_loop(module)]
    adapted: dict[type, type] = {}
    for module in found:
        kind = type(module)
        entries = {"forward": _run_beside_identities, "_apply_gate": _apply_gate, "is_transposed": False}
        module.__class__ = adapted.setdefault(kind, type(kind.__name__, (kind,), entries))
        module.config = model.config
        # Those without weights have rows in some families, which nothing reads.
        own = module.gate_up_proj.detach()[: len(module.down_proj)]
        module.gate_up_proj = nn.Parameter(own, requires_grad=False)
    return len(found)


def _is_loop(module: Any) -> bool:
    """Whether a module's experts are those of ``_run_beside_identities``, on drawn weights."""
    shapes = {name: weight.shape for name, weight in module.named_parameters(recurse=False)}
    is_known = (
        not hasattr(module, "is_transposed")
        and callable(getattr(module, "act_fn", None))
        and shapes.keys() == {"gate_up_proj", "down_proj"}
        and all(len(shape) == 3 for shape in shapes.values())
        and [*signature(module.forward).parameters] == ["hidden_states", "top_k_index", "top_k_weights"]
    )
    if not is_known:
        return False
    generator = torch.Generator().manual_seed(0)
    num_all, num_own = shapes["gate_up_proj"][0], shapes["down_proj"][0]
    small = {"gate_up_proj": (num_all, 8, 6), "down_proj": (num_own, 6, 4)}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in small.items()}
    hidden_TH = torch.randn(3, 6, generator=generator)
    index_Tk = torch.tensor([[0, num_all - 1], [num_own - 1, 0], [num_all - 1, num_own - 1]])
    weights_Tk = torch.rand(3, 2, generator=generator)
    routed = hidden_TH, index_Tk, weights_Tk
    try:
        expected = torch.func.functional_call(module, drawn, routed)
    except RuntimeError:
        return False
    ours = SimpleNamespace(**drawn, act_fn=module.act_fn, is_transposed=False)
    ours._apply_gate = partial(_apply_gate, ours)
    return torch.allclose(_run_beside_identities(ours, *routed), expected, atol=1e-5)


def _run_beside_identities(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    index_Tk = top_k_index.to(torch.int32)
    has_weights = index_Tk < len(self.down_proj)
    own_Tk = torch.where(has_weights, index_Tk, -1)
    out_TH = run_experts(self, hidden_states, own_Tk, torch.where(has_weights, top_k_weights, 0))
    share_T1 = torch.where(has_weights, 0, top_k_weights).sum(dim=-1, keepdim=True)
    return (out_TH + hidden_states * share_T1).to(hidden_states.dtype)


def _apply_gate(self: Any, inner: torch.Tensor) -> torch.Tensor:
    gate, up = inner.chunk(2, dim=-1)
    gated: torch.Tensor = self.act_fn(gate) * up
    return gated


class PanelExperts(nn.Module):
    """Weights of all experts of a layer for one projection, in panels for our kernel.

    Slices of one expert are functions that multiply with its weight. It stands for a parameter ``[E, outputs,
    inputs]`` or ``[E, inputs, outputs]`` in a module that ``run_experts`` runs, uncompiled.

    Args:
        weight: the parameter.
        is_transposed: whether inputs come before outputs.
        memory: receives the panels; see ``num_bytes``.
    """

    packed: torch.Tensor

    def __init__(self, weight: torch.Tensor, is_transposed: bool, memory: Arena) -> None:
        super().__init__()
        shape = self._shape(weight, is_transposed)
        packed = memory.take(shape, weight.dtype)
        for each, panels_of_one in zip(weight.detach(), packed):
            panels.pack(each.t() if is_transposed else each, panels_of_one)
        self.register_buffer("packed", packed, persistent=False)
        self.out_features = weight.shape[2 if is_transposed else 1]

    @staticmethod
    def _shape(weight: torch.Tensor, is_transposed: bool) -> tuple[int, ...]:
        outputs, inputs = weight.shape[:0:-1] if is_transposed else weight.shape[1:]
        return len(weight), *panels.packed_shape(outputs, inputs, weight.dtype)

    @classmethod
    def num_bytes(cls, weight: torch.Tensor, is_transposed: bool) -> int:
        """Bytes of the packed weights."""
        return math.prod(cls._shape(weight, is_transposed)) * weight.dtype.itemsize

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PanelExperts:
        """Leave the panels in the dtype of the checkpoint, whatever their inputs are."""
        return self

    def __len__(self) -> int:
        """Number of experts."""
        return len(self.packed)

    def __getitem__(self, some: slice) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the product of inputs ``[1, X, inputs]`` with the weight of the first expert of a slice."""
        operator = torch.ops.hpu_duo_x86_v3.linear.default
        packed = self.packed[some.start]
        return partial(operator, packed=packed, bias=None, out_features=self.out_features, live=None)


@contextmanager
def experts_skipped(model: nn.Module) -> Iterator[None]:
    """Let experts of families with loops of their own over the chosen ones return zeros on ``meta``.

    There is no choice without weights.
    """
    looping = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts" and not hasattr(module, "is_transposed")
    ]
    on_meta = [each for each in looping if all(weight.is_meta for weight in each.parameters())]
    for module in on_meta:
        vars(module)["forward"] = _as_zeros
    try:
        yield
    finally:
        for module in on_meta:
            del vars(module)["forward"]


def _as_zeros(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros_like(hidden_states)


def stacked_weights(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of all experts in a module that ``run_experts`` runs."""
    if getattr(getattr(module, "config", None), EXPERTS, None) != NAME or not hasattr(
        module, "is_transposed"
    ):
        return ()
    names = ("gate_up_proj", "up_proj", "down_proj")
    return tuple(name for name, _ in module.named_parameters(recurse=False) if name in names)


def copies_weights(num_chosen: int, num_experts: int) -> bool:
    """Whether the weights of the chosen experts of all tokens are gathered before they are used."""
    return _PASSES_OF_A_COPY * num_chosen < num_experts


def weighs_inner(inner_size: int, hidden_size: int) -> bool:
    """Whether activations of experts are weighed before their last product: where they are the smaller ones.

    Results then are summed as they are. Only for experts without biases, and without a norm behind them.
    """
    return inner_size < hidden_size


def elements_per_token(projected: int, inner_size: int, hidden_size: int) -> int:
    """Elements of the intermediates of one expert for each token.

    Args:
        projected: results of the first product, those of gates included.
    """
    if weighs_inner(inner_size, hidden_size):
        return max(2 * projected, inner_size + hidden_size)
    return 2 * (projected + hidden_size)


def experts_at_a_time(
    num_experts: int, bytes_of_one: int, group_bytes: int = GROUP_BYTES, *, is_hpu: bool = False
) -> int:
    """Number of experts to run together, of equal groups where they are few.

    Args:
        bytes_of_one: intermediates of one expert.
        group_bytes: bound on those of a group.
        is_hpu: see ``HPU_GROUP_BYTES``.
    """
    size = max(1, group_bytes // bytes_of_one)
    if is_hpu:
        size = max(size, min(-(-num_experts // MOST_GROUPS), HPU_GROUP_BYTES // bytes_of_one))
    return min(size, num_experts)


def expert_bytes(
    num_tokens: int,
    num_chosen: int,
    num_experts: int,
    inner_size: int,
    hidden_size: int,
    element_bytes: int,
    *,
    is_hpu: bool = False,
) -> int:
    """Peak of the intermediates of gated experts in static shapes, in bytes.

    Args:
        num_chosen: experts of each token.
        is_hpu: see ``HPU_GROUP_BYTES``.
    """
    projected = 2 * inner_size
    # Both projections, and their product with what is left of one of them.
    gates = 2 * projected * element_bytes
    if copies_weights(num_tokens * num_chosen, num_experts):
        return num_tokens * num_chosen * (projected * hidden_size * element_bytes + gates)
    bytes_of_one = num_tokens * elements_per_token(projected, inner_size, hidden_size) * element_bytes
    group = experts_at_a_time(num_experts, bytes_of_one, is_hpu=is_hpu)
    if weighs_inner(inner_size, hidden_size):
        return group * bytes_of_one + num_tokens * hidden_size * _FLOAT32
    # The results, weighed and selected, and in float32.
    results = (inner_size + 3 * hidden_size) * element_bytes + hidden_size * _FLOAT32
    return group * num_tokens * max(gates, results)


def run_experts(
    self: Any,
    hidden_TH: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    group_bytes: int = GROUP_BYTES,
) -> torch.Tensor:
    """Return the output of the chosen experts for each token, ``[T, H]``.

    Args:
        self: transformers' module of all experts, with its weights in one tensor for each projection.
        top_k_index, top_k_weights: ``[T, k]``, numbers among all experts. A module with ``first_expert`` runs
            only its own ones, as many as in its weights.
        group_bytes: bound on the intermediates of experts that run together.
    """
    # Found as int64, which no operator here has to read.
    index_Tk = top_k_index.to(torch.int32)
    index_Tk, top_k_weights = of_own(self, index_Tk, top_k_weights)
    if hidden_TH.device.type == "cpu" and not torch.compiler.is_compiling():
        return _run_chosen(self, hidden_TH, index_Tk, top_k_weights)
    return run_in_static_shapes(self, hidden_TH, index_Tk, top_k_weights, group_bytes=group_bytes)


def of_own(
    self: Any, index_Tk: torch.Tensor, top_k_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return chosen experts by their numbers in the module, and weights; -1 and 0 for others."""
    if (first := getattr(self, "first_expert", None)) is None:
        return index_Tk, top_k_weights
    own_Tk = index_Tk - first
    is_own = (own_Tk >= 0) & (own_Tk < len(self.down_proj))
    return torch.where(is_own, own_Tk, -1), torch.where(is_own, top_k_weights, 0)


def run_in_static_shapes(
    self: Any,
    hidden_TH: torch.Tensor,
    index_Tk: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    group_bytes: int = GROUP_BYTES,
) -> torch.Tensor:
    """``run_experts`` with static shapes, after ``of_own``.

    A few tokens gather the weights of their experts. More tokens run through every expert, whose weights are
    then read once, and results of others than the chosen ones are dropped: more operations, in bounded
    memory.
    """
    if copies_weights(index_Tk.numel(), self.down_proj.shape[0]):
        return _run_copies(self, hidden_TH, index_Tk, top_k_weights)
    return _run_all(self, hidden_TH, index_Tk, top_k_weights, group_bytes)


def _run_chosen(
    self: Any, hidden_TH: torch.Tensor, index_Tk: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Expert by expert, only those that are chosen, and only the tokens that chose them."""
    total_TH = torch.zeros_like(hidden_TH, dtype=torch.float32)
    for expert in index_Tk.unique().tolist():
        if expert < 0:
            continue
        token_X, choice_X = (index_Tk == expert).nonzero(as_tuple=True)
        out_1XH = _run_some(self, hidden_TH[token_X][None], lambda w, e=expert: w[e : e + 1])  # type: ignore[misc]
        out_XH = out_1XH[0] * top_k_weights[token_X, choice_X, None]
        total_TH.index_add_(0, token_X, out_XH.float())
    return total_TH.to(hidden_TH.dtype)


def _run_copies(
    self: Any, hidden_TH: torch.Tensor, index_Tk: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    index_X = torch.clamp(index_Tk, min=0).reshape(-1)
    x_X1H = hidden_TH.repeat_interleave(index_Tk.shape[1], dim=0)[:, None]
    out_XH = _run_some(self, x_X1H, lambda weights: weights.index_select(0, index_X))[:, 0]
    out_TkH = out_XH.view(*index_Tk.shape, -1) * top_k_weights[..., None]
    out_TkH = torch.where(index_Tk[..., None] >= 0, out_TkH, 0)
    return out_TkH.float().sum(dim=1).to(hidden_TH.dtype)


def _run_all(
    self: Any, hidden_TH: torch.Tensor, index_Tk: torch.Tensor, top_k_weights: torch.Tensor, group_bytes: int
) -> torch.Tensor:
    num_experts, num_tokens = self.down_proj.shape[0], hidden_TH.shape[0]
    expert_E = torch.arange(num_experts, dtype=torch.int32, device=hidden_TH.device)
    share_TkE = torch.where(index_Tk[..., None] == expert_E, top_k_weights[..., None], 0)
    share_ET = share_TkE.sum(dim=1).t()
    up_proj = self.gate_up_proj if _has(self, "gate", True) else self.up_proj
    hidden_size, down_proj = hidden_TH.shape[1], self.down_proj
    sizes = up_proj[0].numel() // hidden_size, down_proj[0].numel() // hidden_size, hidden_size
    bytes_of_one = num_tokens * elements_per_token(*sizes) * hidden_TH.element_size()
    is_hpu = hidden_TH.device.type == "hpu"
    group = experts_at_a_time(num_experts, bytes_of_one, group_bytes, is_hpu=is_hpu)
    total_TH = torch.zeros_like(hidden_TH, dtype=torch.float32)
    for begin in range(0, num_experts, group):
        total_TH = total_TH + _run_group(self, hidden_TH, share_ET, slice(begin, begin + group))
    return total_TH.to(hidden_TH.dtype)


def _run_group(self: Any, hidden_TH: torch.Tensor, share_ET: torch.Tensor, some: slice) -> torch.Tensor:
    """The weighted outputs of some experts for all tokens, float32 ``[T, H]``; frees intermediates."""
    share_XT1 = share_ET[some, :, None]
    inner_size = self.down_proj[0].numel() // hidden_TH.shape[1]
    is_linear = not (_has(self, "bias", False) or _has(self, "post_expert_norm", False))
    if is_linear and weighs_inner(inner_size, hidden_TH.shape[1]):
        inner_XTI = _activated(self, hidden_TH, lambda weights: weights[some])
        # Some routers weigh in float32.
        inner_XTI = torch.where(share_XT1 != 0, inner_XTI * share_XT1, 0).to(inner_XTI.dtype)
        out_XTH = _project(self, inner_XTI, "down_proj", lambda weights: weights[some])
        return out_XTH.sum(dim=0, dtype=torch.float32)
    out_XTH = _run_some(self, hidden_TH, lambda weights: weights[some]) * share_XT1
    # Selecting, not only multiplying, excludes overflows in experts that were not chosen.
    return torch.where(share_XT1 != 0, out_XTH, 0).float().sum(dim=0)


def _run_some(self: Any, x: torch.Tensor, pick: Pick) -> torch.Tensor:
    """Tokens through the experts that are picked: ``[T, H]`` or ``[X, 1, H]`` to ``[X, T or 1, H]``."""
    out = _project(self, _activated(self, x, pick), "down_proj", pick)
    if _has(self, "post_expert_norm", False):
        out = self.post_expert_norm(out)
    return out


def _activated(self: Any, x: torch.Tensor, pick: Pick) -> torch.Tensor:
    """Activations of the experts that are picked, between their products."""
    has_gate = _has(self, "gate", True)
    inner: torch.Tensor = _project(self, x, "gate_up_proj" if has_gate else "up_proj", pick)
    return self._apply_gate(inner) if has_gate else self.act_fn(inner)


def _project(self: Any, x: torch.Tensor, name: str, pick: Pick) -> torch.Tensor:
    weights = pick(getattr(self, name))
    if isinstance(weights, torch.Tensor):
        product = torch.matmul(x, weights if self.is_transposed else weights.transpose(1, 2))
    else:  # of ``PanelExperts``
        product = weights(x)
    return product + pick(getattr(self, f"{name}_bias"))[:, None] if _has(self, "bias", False) else product


def _has(self: Any, what: str, default: bool) -> bool:
    """Not every version of transformers has all attributes of experts."""
    return bool(getattr(self, f"has_{what}", default))

"""Latent keys and values of a model (MLA): where its attention expands them, and the projections that do.

transformers keeps latents until an attention module's ``expand_kv(kv_nope, k_rot)``. A served module has one
that passes both on, so that the attention function gets latents in place of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from kernels_ref import LatentKV, LatentSize

_EXPAND = "expand_kv"
_PROJECTION = "kv_b_proj"


class Expansion(NamedTuple):
    """A recorded call of ``expand_kv``.

    Attributes:
        size: of the latents.
        k, v: what it returned, ``[1, heads, Q, D]`` each.
    """

    size: LatentSize
    k: torch.Tensor
    v: torch.Tensor


@contextmanager
def recording_expansions(model: nn.Module) -> Iterator[dict[int, Expansion]]:
    """Record the last call of each module's ``expand_kv``, by the ``id`` of the module."""
    found: dict[int, Expansion] = {}
    modules = [each for each in model.modules() if hasattr(each, _EXPAND) and _is_linear(each)]

    def recorder(module: nn.Module) -> Any:
        expand = getattr(module, _EXPAND)

        def record(kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            k, v = expand(kv_nope, k_rot)
            found[id(module)] = Expansion(LatentSize(kv_nope.shape[-1], k_rot.shape[-1]), k, v)
            return k, v

        return record

    for module in modules:
        vars(module)[_EXPAND] = recorder(module)
    try:
        yield found
    finally:
        for module in modules:
            del vars(module)[_EXPAND]


def latent_projections(model: nn.Module) -> frozenset[str]:
    """Return the names of the weights that expand latents, which are split and so do not stay codes."""
    return frozenset(
        f"{name}.{_PROJECTION}.weight"
        for name, module in model.named_modules()
        if hasattr(module, _EXPAND) and hasattr(module, _PROJECTION)
    )


def _is_linear(module: nn.Module) -> bool:
    """Whether one matrix expands the latents of a module: other formats of weights do not split into two."""
    projection = getattr(module, _PROJECTION, None)
    return type(projection) is nn.Linear and projection.bias is None


class LatentProjection(nn.Module):
    """The projection from latents to the keys, without rotary part, and the values of each head.

    Attributes:
        to_keys: ``[K, P, L]``, of P elements of a key and L of a latent.
        to_values: ``[K, D, L]``.
    """

    def __init__(self, weight: torch.Tensor, num_heads: int, value_dim: int) -> None:
        """Split the weight ``[K * (P + D), L]`` of a linear layer."""
        super().__init__()
        of_heads = weight.detach().unflatten(0, (num_heads, -1))
        sizes = [of_heads.shape[1] - value_dim, value_dim]
        keys, values = (x.contiguous() for x in of_heads.split(sizes, dim=1))
        self.to_keys = nn.Parameter(keys, requires_grad=False)
        self.to_values = nn.Parameter(values, requires_grad=False)

    def forward(self, latent: torch.Tensor, rotary: torch.Tensor) -> LatentKV:
        """Latents ``[Q, 1, L]`` and rotary parts ``[Q, 1, R]`` with the projections."""
        return LatentKV(torch.cat([latent, rotary], dim=-1), self.to_keys, self.to_values)


def check_expansion(
    where: str, module: nn.Module, latent: LatentSize, num_heads: int, value_dim: int
) -> None:
    """Compare our expansion of random latents with that of an attention module.

    Args:
        where: the model and its layer, for messages.

    Raises:
        ValueError: they differ.
    """
    weight = getattr(module, _PROJECTION).weight
    drawn = torch.randn(1, 1, 3, latent.size, generator=torch.Generator().manual_seed(0))
    nope, rotary = drawn.to(weight.device, weight.dtype).split(list(latent), dim=-1)
    with torch.inference_mode():
        wanted = getattr(module, _EXPAND)(nope, rotary)
        ours = LatentProjection(weight, num_heads, value_dim)
        found = ours(*(x[0].transpose(0, 1) for x in (nope, rotary))).expanded()
    tolerance = 1e-4 if weight.dtype == torch.float32 else 3e-2
    for one, other in zip(wanted, found):
        error = (one[0].transpose(0, 1) - other).abs().max() / one.abs().max().clamp(min=1e-6)
        if not error <= tolerance:
            raise ValueError(
                f"{where} cannot be served: expected its keys and values to be linear in latents, by the "
                f"rows of {_PROJECTION} head by head, got a relative error of {error.item():.2g}"
            )


def keep_latents(module: nn.Module, num_heads: int, value_dim: int) -> LatentProjection:
    """Let an attention module pass latents on to the attention function; split its projection, once."""
    projection = getattr(module, _PROJECTION)
    if not isinstance(projection, LatentProjection):
        projection = LatentProjection(projection.weight, num_heads, value_dim)
        setattr(module, _PROJECTION, projection)
        vars(module)[_EXPAND] = _pass_on
    return projection


def _pass_on(kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return kv_nope, k_rot

"""Norms and rotary embeddings of transformers by the fused operators of Gaudi's software.

They take the place of a module's own code where a trial on the device shows equal results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType
from typing import NamedTuple

import torch
from torch import nn

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

"""Package in kvpress's place: its way to cut a cache, with two presses that cut and two that fail."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import _exit
from typing import Any

import torch


@dataclass
class _Press:
    compression_ratio: float = 0.0

    def choose(self, length: int, num_kept: int, weights: torch.Tensor | None) -> torch.Tensor:
        """Positions that stay."""
        raise NotImplementedError

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """Cut the cache behind each attention while a prompt is read."""
        hooks = [
            layer.self_attn.register_forward_hook(self._cut, with_kwargs=True) for layer in model.model.layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _cut(self, module: Any, _: Any, kwargs: dict[str, Any], output: Any) -> Any:
        # Called past_key_value up to transformers 4.55, and past_key_values up to 5.23.
        cache = next(
            kwargs[name] for name in ("cache", "past_key_values", "past_key_value") if name in kwargs
        )
        layer = cache.layers[module.layer_idx]
        length = layer.keys.shape[2]
        kept = self.choose(length, int(length * (1 - self.compression_ratio)), output[1])
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        return output


@dataclass
class StreamingLLMPress(_Press):
    """Keeps the first tokens and the last ones."""

    n_sink: int = 4

    def choose(self, length: int, num_kept: int, weights: torch.Tensor | None) -> torch.Tensor:
        """Sinks and the end."""
        return torch.cat([torch.arange(self.n_sink), torch.arange(length - num_kept + self.n_sink, length)])


@dataclass
class ObservedAttentionPress(_Press):
    """Keeps the tokens with the largest sums of weights, which only one implementation returns."""

    def choose(self, length: int, num_kept: int, weights: torch.Tensor | None) -> torch.Tensor:
        """The heaviest tokens of all heads together."""
        assert weights is not None, "no weights of attention"
        return weights.sum((0, 1, 2)).topk(num_kept).indices


@dataclass
class TOVAPress(_Press):
    """Fails as a press does that does not know a model."""

    def choose(self, length: int, num_kept: int, weights: torch.Tensor | None) -> torch.Tensor:
        """Raise an error."""
        raise NotImplementedError("no such layers here")


@dataclass
class SnapKVPress(_Press):
    """Dies without a word, as a process without memory does."""

    window_size: int = 64
    kernel_size: int = 5

    def choose(self, length: int, num_kept: int, weights: torch.Tensor | None) -> torch.Tensor:
        """End the process."""
        _exit(9)

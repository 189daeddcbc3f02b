"""H2O with positions in the cache, written plainly: one token, one head at a time, over lists of keys.

It shares nothing with ``budget_oracle``: keys are listed before rotary embedding, in the order of the text,
and a token's position is its place in that list. No tensor is as long as the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Entry:
    """A token that a key/value head keeps: key and value ``[D]``, the key without rotation."""

    position: int
    key: torch.Tensor
    value: torch.Tensor
    score: float = 0.0


class RankStream:
    """A Llama model of transformers that reads a stream token by token.

    Args:
        model: float32.
        budget: tokens that each head keeps.
        recent: newest tokens among them that stay.
    """

    def __init__(self, model: Any, budget: int, recent: int) -> None:
        self.model, self.budget, self.recent = model, budget, recent
        config = model.config
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.kept: list[list[list[Entry]]] = [
            [[] for _ in range(config.num_key_value_heads)] for _ in range(config.num_hidden_layers)
        ]
        self.largest_position = 0
        self.position = 0

    @torch.inference_mode()
    def logits_after(self, token: int) -> torch.Tensor:
        """Read a token; logits ``[V]`` behind it."""
        decoder = self.model.model
        x = decoder.embed_tokens.weight[token]
        for layer, kept in zip(decoder.layers, self.kept):
            x = x + self._attend(layer.self_attn, layer.input_layernorm(x), kept)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.position += 1
        logits: torch.Tensor = self.model.lm_head(decoder.norm(x))
        return logits

    def positions(self) -> list[list[list[int]]]:
        """Kept positions in the text, by layer and head."""
        return [[[entry.position for entry in head] for head in layer] for layer in self.kept]

    def _attend(self, module: Any, x: torch.Tensor, kept: list[list[Entry]]) -> torch.Tensor:
        dim = module.head_dim
        queries, keys, values = (
            part(x).view(-1, dim) for part in (module.q_proj, module.k_proj, module.v_proj)
        )
        outputs = []
        for number, head in enumerate(kept):
            if len(head) == self.budget:
                self._evict(head)
            head.append(Entry(self.position, keys[number], values[number]))
            self.largest_position = max(self.largest_position, len(head) - 1)
            for query in queries[number * self.group : (number + 1) * self.group]:
                at_place = self._rotated(query, len(head) - 1)
                scores = [
                    at_place @ self._rotated(entry.key, place) * dim**-0.5 for place, entry in enumerate(head)
                ]
                weights = torch.softmax(torch.stack(scores), dim=0)
                for entry, weight in zip(head, weights.tolist()):
                    entry.score += weight
                outputs.append(sum(weight * entry.value for weight, entry in zip(weights, head)))
        result: torch.Tensor = module.o_proj(torch.cat(outputs))
        return result

    def _evict(self, head: list[Entry]) -> None:
        free = [entry for entry in head if entry.position <= self.position - self.recent]
        head.remove(min(free, key=lambda entry: (entry.score, entry.position)))

    def _rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """A vector at a position: pairs of its halves as complex numbers."""
        half = x.shape[-1] // 2
        theta = self.model.config.rope_parameters["rope_theta"]
        angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = torch.complex(x[:half].double(), x[half:].double()) * torch.exp(1j * angle)
        return torch.cat([turned.real, turned.imag]).float()

"""Attention of a prompt that the blocks of ``top_blocks`` receive, beside the best and the nearest ones.

    OMP_NUM_THREADS=1 python -m benchmarks.block_choice --out benchmarks/results/block-choice.md

The built-in model reads documents with passkeys under full attention. A row has the share of the attention of
tiles that goes to the blocks they would see: as ``top_blocks`` chooses them, as somebody would who knows the
attention, and without looking (the first block and the nearest ones). Tiles that see all are left out. Later
layers read what full attention computed.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from bias_builders import TopBlocks
from hpu_duo.builtin import MODEL_DIR
from hpu_duo.builtin.passkeys import document, token_counter
from kernels_ref.chosen import estimate
from kernels_ref.scoring import Scoring

NAME = "block_choice"
# H query heads, K key/value heads, G query heads of each, L tokens, T tiles, X blocks, B tokens of a block


@dataclass
class Recall:
    """Shares of attention that blocks receive, a mean over tiles and heads for each layer that has been read.

    Attributes:
        estimated, best, near: as chosen, as known, and without looking.
    """

    block_size: int
    choice: TopBlocks
    estimated: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    near: list[float] = field(default_factory=list)

    def add(self, q_HLD: torch.Tensor, k_KLD: torch.Tensor) -> None:
        """Add a layer, from its scaled queries and its keys; the length is a multiple of the block."""
        size, num_heads = self.block_size, len(k_KLD)
        num_tiles = k_KLD.shape[1] // size
        q_KGTBD = q_HLD.unflatten(0, (num_heads, -1)).unflatten(2, (num_tiles, size))
        k_KXBD = k_KLD.unflatten(1, (num_tiles, size))
        number = torch.arange(num_tiles, dtype=torch.int32)
        may_TX = number < number[:, None]
        mass_TKX = estimate(
            q_KGTBD.mean(3).permute(2, 0, 1, 3), k_KXBD.mean(2).transpose(0, 1), may_TX, Scoring()
        )
        true_TKX = _attention(q_HLD, k_KLD, size)
        own = torch.eye(num_tiles, dtype=torch.bool)[:, None]
        asked = slice(self.choice.num_blocks, num_tiles)
        nearest = -(number[:, None] - number)[:, None].expand(true_TKX.shape).float()
        for shares, rank in ((self.estimated, mass_TKX), (self.best, true_TKX), (self.near, nearest.exp2())):
            seen = self.choice.chosen(rank, may_TX, number, number) | own
            shares.append(float((true_TKX * seen).sum(dim=2)[asked].mean()))


def _attention(q_HLD: torch.Tensor, k_KLD: torch.Tensor, size: int) -> torch.Tensor:
    """Share of each block in a tile's attention, mean over queries and query heads, ``[T, K, X]``."""
    length, found = k_KLD.shape[1], []
    for first in range(0, length, size):
        end = first + size
        scores = q_HLD[:, first:end].unflatten(0, (len(k_KLD), -1)) @ k_KLD[:, None, :end].transpose(2, 3)
        hidden = torch.ones(size, end).triu(first + 1).bool()
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).mean(dim=(1, 2))
        found.append(torch.nn.functional.pad(weights, (0, length - end)).unflatten(1, (-1, size)).sum(dim=2))
    return torch.stack(found)


def watch(recalls: list[Recall]) -> Callable[..., Any]:
    """Full attention that shows queries and keys to some measurements."""

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        scaling: float,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        for recall in recalls:
            recall.add(query[0].float() * scaling, key[0].float())
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    return attend


@torch.inference_mode()
def main() -> None:
    """Write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument("--num-documents", type=int, default=4)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[128, 32])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.125, 0.25, 0.5])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    recalls = [
        Recall(size, TopBlocks(int(share * args.num_tokens / size)))
        for size in args.block_sizes
        for share in args.shares
    ]
    AttentionInterface.register(NAME, watch(recalls))
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32, attn_implementation=NAME)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    for seed in range(args.num_documents):
        size = max(args.block_sizes)
        written = document(
            token_counter(tokenizer),
            num_tokens=args.num_tokens + size,
            num_passkeys=4,
            passkey_words=16,
            seed=seed,
        )
        tokens = tokenizer(written.text, return_tensors="pt").input_ids[:, : args.num_tokens]
        model(input_ids=tokens, attention_mask=torch.zeros(1, 1, 1, 1), use_cache=False)
    num_layers = model.config.num_hidden_layers
    lines = [
        "# Attention that the chosen blocks of a prompt receive",
        "",
        f"The built-in model under full attention, {args.num_documents} documents of {args.num_tokens}",
        "tokens; means over heads and tiles that do not see all blocks.",
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {date.today()}.",
        "",
        "| block | blocks seen | layer | `top_blocks` | best | first and nearest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for recall in recalls:
        for layer in range(num_layers):
            means = (
                sum(x[layer::num_layers]) / args.num_documents
                for x in (recall.estimated, recall.best, recall.near)
            )
            of_layer = " | ".join(f"{mean:.3f}" for mean in means)
            lines.append(f"| {recall.block_size} | {recall.choice.num_blocks} | {layer} | {of_layer} |")
    text = "\n".join([*lines, ""])
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

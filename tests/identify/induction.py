"""A Llama whose weights are written by hand: one head copies, all others look a few tokens back.

The residual stream is [A | B | C | constant]: the code of the token, the code of the token before it (written
by head 0 of layer 0), what other heads write, and ones. RoPE turns the first channels of each half of a head
quickly and the last ones hardly at all: the former tell positions, the latter compare codes.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hpu_duo.builtin import MODEL_DIR

CODE, CONSTANT, HEAD_DIM, NUM_HEADS, VOCAB = 36, 20, 64, 4, 1152
HIDDEN = 3 * CODE + CONSTANT
HALF = HEAD_DIM // 2
POSITION_CHANNELS = HALF - CODE // 2
THETA = 1e8
A, B, C = (slice(i * CODE, (i + 1) * CODE) for i in range(3))
CONSTANTS = slice(3 * CODE, HIDDEN)

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "head_dim": HEAD_DIM,
    "rope_theta": THETA,
    "max_position_embeddings": 1024,
}

INDUCTION_HEAD = (1, 2)
"""Layer and KV head of the head that copies."""

LOOK_BACK = {(0, 0): 1, (0, 1): 2, (0, 2): 3, (0, 3): 5, (1, 0): 1, (1, 1): 4, (1, 3): 2}
"""Distance in tokens that every other head looks back."""


def save_induction_model(directory: Path) -> None:
    """Write the checkpoint, with the tokenizer of the built-in model."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        embedding = model.model.embed_tokens.weight
        codes = torch.randn(VOCAB, CODE)
        embedding[:, A] = codes / codes.norm(dim=1, keepdim=True)
        embedding[:, CONSTANTS] = 1.0
        for (layer, head), distance in LOOK_BACK.items():
            _look_back(model, layer, head, distance)
        _induction(model, *INDUCTION_HEAD)
        # The first head hands on the code of the token before; the others write something of what they see.
        _write(model, 0, 0, B, torch.eye(CODE))
        for layer, head in [*list(LOOK_BACK)[1:], INDUCTION_HEAD]:
            _write(model, layer, head, C, torch.linalg.qr(torch.randn(CODE, CODE)).Q)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, directory / name)


def _rows(weight: Tensor, head: int) -> Tensor:
    return weight[head * HEAD_DIM : (head + 1) * HEAD_DIM]


def _look_back(model: LlamaForCausalLM, layer: int, head: int, distance: int) -> None:
    """Query and key read only constants; after RoPE their product peaks at the distance."""
    attention = model.model.layers[layer].self_attn
    frequencies = THETA ** (-torch.arange(HALF) / HALF)
    amplitude = torch.where(torch.arange(HALF) < POSITION_CHANNELS, 6.0, 0.0)
    phase = -distance * frequencies
    wanted = torch.cat((amplitude * phase.cos(), amplitude * phase.sin()))
    _rows(attention.q_proj.weight, head)[:, CONSTANTS] = (wanted / CONSTANT).unsqueeze(1)
    wanted = torch.cat((amplitude, torch.zeros(HALF)))
    _rows(attention.k_proj.weight, head)[:, CONSTANTS] = (wanted / CONSTANT).unsqueeze(1)


def _induction(model: LlamaForCausalLM, layer: int, head: int) -> None:
    """The query is the token's code, the key the code of the token before."""
    attention = model.model.layers[layer].self_attn
    slow = [*range(POSITION_CHANNELS, HALF), *range(HALF + POSITION_CHANNELS, HEAD_DIM)]
    # After the norm codes are about twice as long; 1/8 is the scale of the scores.
    gain = math.sqrt(40 * 8 / 4)
    _rows(attention.q_proj.weight, head)[slow, A] = gain * torch.eye(CODE)
    _rows(attention.k_proj.weight, head)[slow, B] = gain * torch.eye(CODE)


def _write(model: LlamaForCausalLM, layer: int, head: int, to: slice, how: Tensor) -> None:
    """The head's values are codes, and it adds them to the residual stream, mixed by ``how``."""
    attention = model.model.layers[layer].self_attn
    _rows(attention.v_proj.weight, head)[:CODE, A] = 0.4 * torch.eye(CODE)
    attention.o_proj.weight[to, head * HEAD_DIM : head * HEAD_DIM + CODE] = how

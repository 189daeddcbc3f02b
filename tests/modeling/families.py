"""Tiny random checkpoints of many families, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

BLOCK = 8
WINDOW = 11
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3, 5 * BLOCK + 2)
VOCAB = 96

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LENGTH_DEPENDENT: tuple[dict[str, Any], ...] = (
    {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0},
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0, 1.1, 1.3, 1.5],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 64,
        "rope_theta": 10_000.0,
    },
)
"""Rotary embeddings of heads of size 8 whose frequencies change with the length of a sequence."""


VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
IS_5 = VERSION >= (5, 0)
"""Older versions lack some families, and serve fewer of those they have; only what they have is tested."""


def make_config(name: str, **fields: Any) -> PretrainedConfig:
    """A configuration by the name of its class."""
    config: PretrainedConfig = getattr(transformers, name)(**fields)
    return config


def is_known(name: str) -> bool:
    """Whether the installed transformers has this configuration class; none may be missing from 5 on."""
    known = hasattr(transformers, name)
    assert known or not IS_5, f"transformers {transformers.__version__} has no {name}"
    return known


def _of(name: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    return name, {**BASE, **changes}


_ALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": _of("LlamaConfig"),
    "llama_mha": _of("LlamaConfig", num_key_value_heads=4),
    "llama_mqa": _of("LlamaConfig", num_key_value_heads=1),
    "llama3_rope": _of("LlamaConfig", rope_scaling=LLAMA3),
    "llama_biases_tied": _of("LlamaConfig", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": _of("MistralConfig", sliding_window=None),
    "mistral_sliding": _of("MistralConfig", sliding_window=WINDOW),
    "qwen2": _of("Qwen2Config"),
    "qwen2_partly_sliding": _of(
        "Qwen2Config", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3": _of("Qwen3Config", head_dim=16),
    "gemma2": _of("Gemma2Config", head_dim=8, query_pre_attn_scalar=12, sliding_window=WINDOW),
    "gemma3": _of(
        "Gemma3TextConfig",
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": _of("Phi3Config", sliding_window=None),
    "phi3_sliding": _of("Phi3Config", sliding_window=WINDOW),
    "granite": _of(
        "GraniteConfig",
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        logits_scaling=0.5,
    ),
    "olmo2": _of("Olmo2Config"),
    "olmo3": _of("Olmo3Config", sliding_window=WINDOW),
    "smollm3": _of("SmolLM3Config", no_rope_layers=[1, 0, 1, 0]),
    "gpt_oss": _of(
        "GptOssConfig",
        head_dim=8,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_scaling=None,
    ),
    "mixtral": _of("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": _of(
        "Qwen3MoeConfig", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "cohere": _of("CohereConfig", logit_scale=1.0),
    "cohere2": _of("Cohere2Config", sliding_window=WINDOW, logit_scale=1.0),
    "starcoder2": _of("Starcoder2Config", sliding_window=None),
    "phi": _of("PhiConfig", partial_rotary_factor=0.5),
    "gpt_neox": _of("GPTNeoXConfig", rotary_pct=0.5),
    "gpt2": _of("GPT2Config"),
    # Layers that hand no arguments of their own on to their attention, GPT-2's before 5 too.
    "stablelm": _of("StableLmConfig", qk_layernorm=True),
    "nemotron": _of("NemotronConfig"),
    "gptj": _of("GPTJConfig", rotary_dim=4),
}
# Before these versions they have attention classes of their own.
_SERVED_FROM = {"stablelm": (5, 0), "nemotron": (5, 0), "gptj": (5, 24)}

# Its experts are separate parameters before 5, so a seed draws another model there. No near ties in either.
_SEEDS = {"mixtral": 1}

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    name: partial(make_config, of_class, **fields)
    for name, (of_class, fields) in _ALL.items()
    if is_known(of_class) and _SERVED_FROM.get(name, (0, 0)) <= VERSION
}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough for greedy tokens to follow the context; norms and biases off their defaults."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * 0.35)
            else:
                parameter.add_(noise * 0.2)


def save_random(config: PretrainedConfig, directory: Path, seed: int = 0) -> Any:
    """A random float32 model, saved without end-of-text tokens; returned as transformers has it."""
    with torch.random.fork_rng():
        # Some families draw one-dimensional parameters, such as sink logits, that are only shifted below.
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    randomise(model, seed)
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.save_pretrained(directory)
    return model


def prompts_of(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Random prompts without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def greedy(model: Any, prompt: Sequence[int], num_new: int) -> list[int]:
    """New tokens of transformers' own greedy search."""
    tokens = torch.tensor([list(prompt)])
    output = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=num_new
    )
    return output[0, len(prompt) :].tolist()


class Zoo:
    """Checkpoints by name, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.load = cache(self._make)
        self.greedy = cache(self._greedy)

    def _make(self, name: str) -> tuple[Any, Path]:
        directory = self._root / name
        return save_random(FAMILIES[name](), directory, _SEEDS.get(name, 0)), directory

    def _greedy(self, name: str, num_new: int) -> list[list[int]]:
        """transformers' tokens for ``prompts_of()``."""
        model, _ = self.load(name)
        return [greedy(model, prompt, num_new) for prompt in prompts_of()]

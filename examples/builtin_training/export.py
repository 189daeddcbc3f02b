"""Writes the trained weights as a transformers checkpoint directory, and loads it for evaluation."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from builtin_training.attention import ATTENTION_NAME, register
from builtin_training.initialisation import SHIPPED, Shape
from builtin_training.tokenizer import build_tokenizer, save_tokenizer


def export(model: LlamaForCausalLM, directory: Path, shape: Shape = SHIPPED) -> None:
    """Write config, bfloat16 weights, tokenizer and generation config.

    The JSON files are written here and not by ``save_pretrained``, whose output depends on the installed
    version; these fields are understood by transformers 4.55 and 5.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = shape.config
    architecture = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    _write(directory / "config.json", {**architecture, **config, "torch_dtype": "bfloat16"})
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(directory / "generation_config.json", {**ends, "do_sample": False})
    save_tokenizer(build_tokenizer(), directory, config["max_position_embeddings"])
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
    }
    weights_file = directory / "model.safetensors"
    save_file(weights, weights_file, metadata={"format": "pt"})
    weights_file.chmod(0o644)


def load(directory: Path, dtype: torch.dtype, device: str = "cpu") -> LlamaForCausalLM:
    """The exported model with the training attention, which takes a head plan."""
    register()
    model = LlamaForCausalLM.from_pretrained(directory, torch_dtype=dtype, attn_implementation=ATTENTION_NAME)
    return model.eval().to(device)


def _write(path: Path, fields: dict[str, object]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n")

"""Write a Llama checkpoint of transformers as a GGUF file in float16: ``llama_cpp_export.py DIR FILE``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def name_of(name: str) -> str:
    """The name in GGUF of a weight of transformers' Llama."""
    name = name.removesuffix(".weight")
    if name in WHOLE:
        return WHOLE[name] + ".weight"
    _, _, number, rest = name.split(".", 3)
    return f"blk.{number}.{NAMES[rest]}.weight"


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head with the pairs of a rotation side by side, as llama.cpp has them."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def main(source: Path, target: Path) -> None:
    """Write the file."""
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for name, tensor in load_file(source / "model.safetensors").items():
        weight = tensor.float().numpy()
        for part, number in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:
                weight = interleaved(weight, number)
        writer.add_tensor(name_of(name), weight if weight.ndim == 1 else weight.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

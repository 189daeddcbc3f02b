"""Decodes over stored latents, read absorbed, against keys and values of each head, expanded.

    python -m benchmarks.latents --heads 32 --dtype bfloat16 --out latents.md

A random model with the attention of DeepSeek-V3 (latents of 512 and 64, heads of 192 and 128) in fewer heads
and layers, served once as it is and once as if its family had no ``expand_kv``. Both decode the same number
of tokens behind the same prompt in turns; times are CPU seconds of the process.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpu_duo import HPUDuoModel, SamplingParams
from hpu_duo.modeling import latents

LENGTHS = (4096, 16384)
NUM_DECODES = 16
ROUNDS = 5
MARGIN = 256
"""Tokens of a request besides its prompt."""


def save_model(path: Path, num_layers: int, num_heads: int) -> None:
    """Save a random model: attention of DeepSeek-V3's sizes and plain, narrow MLPs."""
    config = AutoConfig.for_model(
        "deepseek_v3",
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=num_layers,
        first_k_dense_replace=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=2 * max(LENGTHS),
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)


def load(path: Path, dtype: str, *, is_expanded: bool) -> HPUDuoModel:
    """Serve it, with latents or with keys and values of each head."""
    options: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 2048, "block_size": 128}
    sizes: dict[str, Any] = {
        "max_model_len": max(LENGTHS) + MARGIN,
        "device": "cpu",
        "enable_prefix_caching": True,
    }
    if not is_expanded:
        return HPUDuoModel.from_pretrained(path, dtype=dtype, **options, **sizes)
    with patch.object(latents, "_is_linear", lambda _: False):
        return HPUDuoModel.from_pretrained(path, dtype=dtype, **options, **sizes)


def decode_seconds(served: HPUDuoModel, prompt: list[int]) -> tuple[float, list[int]]:
    """CPU seconds of one decode behind a prompt, whose prefix is cached, and the tokens."""
    params = SamplingParams(temperature=0, max_tokens=NUM_DECODES + 1, ignore_eos=True)
    engine = served.engine
    engine.add_request(prompt, params)
    tokens: list[int] = []
    while not tokens:
        tokens += [token for output in engine.step() for token in output.token_ids]
    begin = time.process_time()
    while engine.has_unfinished:
        tokens += [token for output in engine.step() for token in output.token_ids]
    return (time.process_time() - begin) / NUM_DECODES, tokens


def report(dtype: str, num_layers: int, num_heads: int) -> str:
    """Measure, and return lines of the table."""
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        save_model(path, num_layers, num_heads)
        both = [load(path, dtype, is_expanded=is_expanded) for is_expanded in (False, True)]
    for length in LENGTHS:
        prompt = torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(1)).tolist()
        # The first round fills the prefix cache.
        rounds = [[decode_seconds(served, prompt) for served in both] for _ in range(ROUNDS + 1)][1:]
        seconds = [statistics.median(each[place][0] for each in rounds) for place in (0, 1)]
        ratios = sorted(expanded[0] / absorbed[0] for absorbed, expanded in rounds)
        sizes = [served.engine.runner.store.plan.bytes_per_request(length) for served in both]
        lines.append(
            f"| {dtype} | {length:,} | {1e3 * seconds[0]:.1f} | {1e3 * seconds[1]:.1f} | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) | "
            f"{sizes[0] / 2**20:.1f} | {sizes[1] / 2**20:.1f} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    arguments = parser.parse_args()
    table = "\n".join(report(dtype, arguments.layers, arguments.heads) for dtype in arguments.dtype)
    page = f"""# Latents, absorbed against expanded

One request decodes {NUM_DECODES} tokens behind a prompt: layers={arguments.layers},
heads={arguments.heads}, with the attention sizes of DeepSeek-V3 (latents of 512 and 64 elements, keys of 192
and values of 128 for each head), random weights, `benchmarks/latents.py`. Medians of {ROUNDS} rounds,
in turns, in CPU time of the process, on {platform.machine()} with {torch.get_num_threads()} threads and torch
{torch.__version__}.

| dtype | context | absorbed, ms a decode | expanded, ms | expanded / absorbed | latents, MiB | heads, MiB |
| --- | --- | --- | --- | --- | --- | --- |
{table}
"""
    if arguments.out is not None:
        arguments.out.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()

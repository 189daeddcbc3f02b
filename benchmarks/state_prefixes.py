"""Hits of prefixes whose requests end differently, for a model with states beside one that only attends.

A state is valid only where it was taken, so a document hits if its end, or a branch behind it, has one.

python -m benchmarks.state_prefixes
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams

PROMPT = 2_200
SHARED = (1_600, 1_500)
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
STATES: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "mlp_only_layers": [0, 1, 2, 3],
}
MODELS = {"delta rule": ("Qwen3NextConfig", STATES), "attention": ("Qwen3Config", {})}


def main() -> None:
    """Print hits and CPU time to the first token of each model and length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-requests", type=int, default=64)
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for name, (config, more) in MODELS.items():
        with tempfile.TemporaryDirectory() as directory:
            torch.manual_seed(0)
            made = getattr(transformers, config)(**SIZES, **more)
            AutoModelForCausalLM.from_config(made).save_pretrained(directory)
            for shared in SHARED:
                print(f"{name}, {shared:,} of {PROMPT:,} tokens shared: ", end="", flush=True)
                print(serve(Path(directory), shared, args.num_requests), flush=True)


def serve(path: Path, num_shared: int, num_requests: int) -> str:
    """Serve requests one after the other; returns a line of results."""
    served = HPUDuoModel.from_pretrained(path, max_model_len=PROMPT + 8, max_num_seqs=4, dtype="float32")
    generator = torch.Generator().manual_seed(num_shared)
    document = torch.randint(512, (num_shared,), generator=generator).tolist()
    hits, seconds = [], []
    for _ in range(num_requests):
        own = torch.randint(512, (PROMPT - num_shared,), generator=generator).tolist()
        begin = process_time()
        [[sample]] = served.engine.generate([[*document, *own]], SamplingParams(temperature=0, max_tokens=1))
        seconds.append(process_time() - begin)
        hits.append(sample.num_cached_tokens)
    misses = [number + 1 for number, hit in enumerate(hits) if not hit]
    return (
        f"{num_requests - len(misses)} of {num_requests} requests hit, not {misses}; tokens of a hit "
        f"{sorted(set(hits) - {0})}; first token {median(seconds[:2]):.2f} s of CPU without, "
        f"{median(seconds[2:]):.2f} s from the third request on"
    )


if __name__ == "__main__":
    main()

"""Whole decodes of which each token reads the pages that it chooses, beside full attention.

    python -m benchmarks.quest_decodes --tokens 16384

Engines with the same random model, one for each block size and rule, decode behind the same prompt in turn,
step by step; times are CPU seconds of the process with one thread.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hpu_duo import HPUDuoModel, SamplingParams

CASES: list[tuple[int, str | None]] = [
    (128, None),
    (16, None),
    *((16, f"quest:pages=64,every={every}") for every in (1, 4, 8)),
    *((128, f"quest:pages=16,every={every}") for every in (1, 4, 8)),
]
"""Tokens of a block, and the rule; times are divided by those of the first."""
NUM_WARM_UP, NUM_DECODES, MARGIN = 4, 36, 128


def save_model(path: str, num_kv_heads: int) -> None:
    """Save a random model of 2 layers with 8 query heads of 64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=num_kv_heads,
        head_dim=64,
        max_position_embeddings=1 << 17,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def decode_ms(path: str, num_tokens: int) -> list[float]:
    """Return the median milliseconds of a decode of each case behind a prompt of ``num_tokens``."""
    prompt = torch.randint(3, 500, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(temperature=0, max_tokens=NUM_WARM_UP + NUM_DECODES + 2, ignore_eos=True)
    engines = []
    for block_size, rule in CASES:
        model = HPUDuoModel.from_pretrained(
            path,
            dtype="float32",
            attention="sdpa",
            attention_rule=rule,
            block_size=block_size,
            num_blocks=(num_tokens + MARGIN) // block_size + 4,
            max_model_len=num_tokens + MARGIN,
            max_num_seqs=1,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
        )
        engine = model.engine
        engine.add_request(prompt, params)
        while not engine.stats().num_output_tokens:
            engine.step()
        engines.append(engine)
    times: list[list[float]] = [[] for _ in engines]
    for _ in range(NUM_WARM_UP + NUM_DECODES):
        for engine, found in zip(engines, times):
            begin = time.process_time()
            engine.step()
            found.append(time.process_time() - begin)
    return [1e3 * statistics.median(found[NUM_WARM_UP:]) for found in times]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of the prompt (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[2, 8], help="(default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.tokens} tokens, {platform.machine()}, torch {torch.__version__}\n")
    print("| KV heads | block, rule | decode, ms | of full |\n| --- | --- | --- | --- |")
    for num_kv_heads in args.kv_heads:
        with tempfile.TemporaryDirectory() as path:
            save_model(path, num_kv_heads)
            found = decode_ms(path, args.tokens)
        for (block_size, rule), each in zip(CASES, found):
            name = f"{block_size}, `{rule or 'full'}`"
            print(f"| {num_kv_heads} | {name} | {each:.1f} | {each / found[0]:.2f} |")


if __name__ == "__main__":
    main()

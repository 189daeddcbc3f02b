"""Whole decodes of which each token reads the pages that it chooses, beside full attention.

    python -m benchmarks.quest_decodes --tokens 16384

Engines with the same random model, one for each block size and rule, decode behind the same prompt in turn,
step by step; times are CPU seconds of the process with one thread. Then what decodes read is counted, by the
pages and the blocks that kernels get.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hpu_duo import HPUDuoModel, SamplingParams
from kernels_ref.groups import quest
from kernels_ref.sdpa import sparse

CASES: list[tuple[int, str | None]] = [
    (128, None),
    (16, None),
    *((16, f"quest:pages=64,every={every}") for every in (1, 4, 8)),
    *((128, f"quest:pages=16,every={every}") for every in (1, 4, 8)),
]
"""Tokens of a block, and the rule; times are divided by those of the first."""
NUM_WARM_UP, NUM_DECODES, NUM_COUNTED, MARGIN = 4, 36, 8, 128


@dataclass
class Reads:
    """Bytes and pages that decodes under Quest have read, of all layers and key/value heads.

    Attributes:
        num_pages: pages with a visible key.
        key_bytes: bytes of keys and values that a token sees.
        bound_bytes: bytes of minima and maxima that a token compares.
    """

    num_pages: int = 0
    key_bytes: int = 0
    bound_bytes: int = 0


@contextmanager
def counting_reads() -> Iterator[Reads]:
    """Count them, with the kernels of ``sdpa``, by the numbers of pages and blocks that these get."""
    found, as_rows, best_pages = Reads(), quest.as_rows, sparse.best_pages

    def count_pages(*args: Any) -> Any:
        rows, blocks = as_rows(*args)
        visible, keys = blocks.tails.visible, rows.units.tensors[0]
        found.num_pages += int((visible > 0).sum())
        found.key_bytes += 2 * int(visible.sum()) * keys.shape[-1] * keys.itemsize
        return rows, blocks

    def count_bounds(q: Any, low: torch.Tensor, high: Any, table: torch.Tensor, *rest: Any) -> Any:
        found.bound_bytes += 2 * table.numel() * low[0].numel() * low.itemsize
        return best_pages(q, low, high, table, *rest)

    with patch.object(quest, "as_rows", count_pages), patch.object(sparse, "best_pages", count_bounds):
        yield found


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


def decode_costs(path: str, num_tokens: int) -> list[tuple[float, Reads]]:
    """Decode in each case behind a prompt of ``num_tokens``.

    Returns:
        Median milliseconds of a decode, and what ``NUM_COUNTED`` decodes read: nothing under full attention.
    """
    prompt = torch.randint(3, 500, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(
        temperature=0, max_tokens=NUM_WARM_UP + NUM_DECODES + NUM_COUNTED + 2, ignore_eos=True
    )
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
    reads = []
    for engine in engines:
        with counting_reads() as counted:
            for _ in range(NUM_COUNTED):
                engine.step()
        reads.append(counted)
    return [(1e3 * statistics.median(found[NUM_WARM_UP:]), read) for found, read in zip(times, reads)]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of the prompt (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[2, 8], help="(default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.tokens} tokens, {platform.machine()}, torch {torch.__version__}\n")
    print("| KV heads | block, rule | decode, ms | of full | keys and values read, MiB | bounds, MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for num_kv_heads in args.kv_heads:
        with tempfile.TemporaryDirectory() as path:
            save_model(path, num_kv_heads)
            found = decode_costs(path, args.tokens)
        for (block_size, rule), (ms, reads) in zip(CASES, found):
            name = f"{block_size}, `{rule or 'full'}`"
            bytes_read = reads.key_bytes, reads.bound_bytes
            columns = " | ".join(
                f"{each / NUM_COUNTED / (1 << 20):.3f}" if rule else "" for each in bytes_read
            )
            print(f"| {num_kv_heads} | {name} | {ms:.1f} | {ms / found[0][0]:.2f} | {columns} |")


if __name__ == "__main__":
    main()

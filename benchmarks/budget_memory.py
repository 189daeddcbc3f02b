"""Memory that a long prompt takes with a KV budget beside full attention, on a random model.

    OMP_NUM_THREADS=1 python -m benchmarks.budget_memory --out benchmarks/results/budget-memory.md

Each engine runs in a process of its own: first a prompt of one chunk, then the long one, and three tokens
after each. A row gives by how much the process's peak of resident memory is higher during the second, and the
bytes that the second held, beside what the formula of ``docs/kv-budget.md`` says. Linux only.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams

VOCAB, CHUNK, BLOCK, NUM_NEW = 512, 512, 128, 3
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, ITEM_BYTES, STATE_BYTES = 16, 8, 64, 2, 8
POLICIES = ("h2o", "tova", "snapkv")
SHARES = (0.2, 0.05)
WHOLE = ("h2o", "snapkv")
"""Policies that are run with whole prompts besides, at the first share."""


@dataclass(frozen=True)
class Taken:
    """Memory and time of the long prompt.

    Attributes:
        risen_bytes: peak of resident memory less that of the short prompt.
        held_bytes: bytes held of the request when its last token has been decoded.
        store_bytes: bytes of all stores of the engine, trash and scratch included.
        seconds: of processor time.
    """

    risen_bytes: int
    held_bytes: int
    store_bytes: int
    seconds: float


def run(path: Path, policy: str, num_slots: int, num_tokens: int) -> Taken:
    """Serve a short prompt and a long one in this process.

    Args:
        policy: its name, with ``whole`` behind it where it chooses once, at the end; or ``full``.
        num_slots: tokens that a head keeps under it.
    """
    name, _, is_whole = policy.partition(" ")
    budget: dict[str, Any] = {"kv_policy": name, "kv_budget": num_slots, "kv_chunk": CHUNK}
    if is_whole:
        budget["kv_prompt"] = "whole"
    if policy == "full":
        budget = {}
    model = HPUDuoModel.from_pretrained(
        path,
        block_size=BLOCK,
        max_num_seqs=1,
        max_num_batched_tokens=CHUNK,
        max_model_len=num_tokens + NUM_NEW,
        enable_prefix_caching=False,
        **budget,
    )
    prompt = torch.randint(VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    _forget_peak()  # loading takes more than a short prompt
    _held(model, prompt[:CHUNK])
    short = _peak_bytes()
    _forget_peak()
    begin = time.process_time()
    held = _held(model, prompt)
    seconds = time.process_time() - begin
    return Taken(_peak_bytes() - short, held, model.engine.runner.store.num_bytes, seconds)


def _held(model: HPUDuoModel, prompt: list[int]) -> int:
    """Serve a prompt, and return the most bytes that it held between steps."""
    engine, most = model.engine, 0
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
        most = max(most, model.stats().held_bytes)
    return most


def _forget_peak() -> None:
    """Begin the peak of resident memory anew, as ``man 5 proc`` has it of ``clear_refs``."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def in_own_process(path: Path, policy: str, num_slots: int, args: argparse.Namespace) -> Taken:
    """Run in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.budget_memory", "--tokens", str(args.tokens)]
    command += ["--one", str(path), policy, str(num_slots)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Taken(**json.loads(done.stdout.splitlines()[-1]))


def formula(policy: str, num_slots: int, args: argparse.Namespace) -> int:
    """Bytes of a request before its last two tokens: whole blocks, or slots and their state."""
    pair, heads = 2 * HEAD_DIM * ITEM_BYTES, NUM_KV_HEADS * args.layers
    if policy == "full":
        return heads * -(-(args.tokens + NUM_NEW - 2) // BLOCK) * BLOCK * pair
    return heads * num_slots * (pair + STATE_BYTES)


def rows(path: Path, args: argparse.Namespace) -> list[str]:
    """The table."""
    lines = [
        f"| policy | slots of a head | peak rose by, {(mib := 'MiB')} | this / full | held, {mib} "
        f"| by formula, {mib} | held / full | stores, {mib} | seconds, this / full |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    full = None
    asked = [("full", args.tokens)]
    asked += [(name, math.ceil(share * args.tokens)) for share in SHARES for name in POLICIES]
    asked += [(f"{name} whole", math.ceil(SHARES[0] * args.tokens)) for name in WHOLE]
    for policy, num_slots in asked:
        taken = in_own_process(path, policy, num_slots, args)
        full = full or taken
        print(policy, num_slots, asdict(taken), file=sys.stderr, flush=True)
        lines.append(
            f"| {policy} | {num_slots:,} | {taken.risen_bytes / 2**20:,.0f} "
            f"| {taken.risen_bytes / full.risen_bytes:.2f} | {taken.held_bytes / 2**20:,.2f} "
            f"| {formula(policy, num_slots, args) / 2**20:,.2f} | {taken.held_bytes / full.held_bytes:.3f} "
            f"| {taken.store_bytes / 2**20:,.0f} | {taken.seconds / full.seconds:.2f} |"
        )
    return lines


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(asdict(run(Path(args.one[0]), args.one[1], int(args.one[2]), args.tokens))))
        return
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=NUM_HEADS * HEAD_DIM,
        intermediate_size=2816,
        num_hidden_layers=args.layers,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=1 << 17,
        dtype="bfloat16",
    )
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
        lines = rows(Path(directory), args)
    where = f"{torch.get_num_threads()} thread(s), {platform.machine()}"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    sizes = f"{args.layers} layers of {NUM_HEADS} query and {NUM_KV_HEADS} KV heads of {HEAD_DIM}"
    head = [
        f"# Memory of a prompt of {args.tokens:,} tokens",
        "",
        f"`python -m benchmarks.budget_memory --tokens {args.tokens} --layers {args.layers}`, "
        f"{date.today()}, {where}, {versions}. {sizes}, hidden size {config.hidden_size:,}, bfloat16, "
        f"{BLOCK} tokens a block, one request, chunks of {CHUNK} tokens.",
        "",
    ]
    text = "\n".join([*head, *lines, ""])
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

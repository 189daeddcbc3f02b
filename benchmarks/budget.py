"""Decodes of heads with a KV budget beside full attention, on a random model, side by side in one process.

    OMP_NUM_THREADS=1 python -m benchmarks.budget --out benchmarks/results/budget.md

Requests have a context of ``--context`` tokens. It is scheduled and not computed, so that only decodes are
run; stores are written to once, since memory that was never written is read from a single page. Engines take
turns; a row gives the median CPU time of a decode step, its ratio to full attention, and bytes held. Then
every engine serves as many requests as the same bytes of keys and values hold.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from hpu_duo import HPUDuoModel
from hpu_duo.request import Request
from hpu_duo.sampling import SamplingParams

VOCAB, CHUNK = 512, 512
POLICIES = ("full", "local", "streaming-llm", "tova", "h2o")


@dataclass
class Engine:
    """An engine in the middle of decodes."""

    name: str
    model: HPUDuoModel
    num_requests: int

    @classmethod
    def at(cls, path: Path, name: str, num_requests: int, args: argparse.Namespace) -> Engine:
        """Load a model, and bring so many requests to the end of their prompt without computing it."""
        budget: dict[str, Any] = {}
        # The first requests decode while others read their prompts.
        num_new = num_requests * (args.context // CHUNK + 2) + 2 * args.steps
        if name != "full":
            budget = {"kv_policy": name, "kv_budget": args.budget, "kv_chunk": CHUNK}
        model = HPUDuoModel.from_pretrained(
            path,
            dtype=args.dtype,
            graphs=args.graphs,
            max_num_seqs=num_requests,
            max_num_batched_tokens=CHUNK + num_requests,
            max_model_len=args.context + num_new,
            enable_prefix_caching=False,
            **budget,
        )
        for layer in model.engine.runner.store.layers:
            for units in layer:
                units.k_flat.fill_(0.5)
                units.v_flat.fill_(0.5)
        engine, params = model.engine, SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
        for number in range(num_requests):
            engine.scheduler.add(Request(str(number), [3] * (args.context - 1), params, engine.limits))
        while True:
            plan = engine.scheduler.plan()
            assert plan is not None
            engine.scheduler.commit(plan, [3] * len(plan.sampled_rows))
            if len(plan.sampled_rows) == num_requests:
                return cls(name, model, num_requests)

    def step(self) -> float:
        """Run a decode of all requests; returns its seconds of CPU time."""
        engine = self.model.engine
        plan = engine.scheduler.plan()
        assert plan is not None
        message = engine.runner.builder.build(plan, {}).message
        begin = time.process_time()
        engine.runner.executor.logits(message)
        seconds = time.process_time() - begin
        engine.scheduler.commit(plan, [3] * len(plan.sampled_rows))
        return seconds

    @property
    def held_bytes(self) -> int:
        """Bytes of keys, values and state of the requests."""
        return self.model.stats().held_bytes


def measured(engines: list[Engine], num_steps: int) -> dict[str, float]:
    """Median seconds of a step of each engine; they take turns."""
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for number in range(num_steps + 1):
        for engine in engines:
            taken = engine.step()
            if number:
                seconds[engine.name].append(taken)
    return {name: statistics.median(each) for name, each in seconds.items()}


def decodes(path: Path, args: argparse.Namespace) -> list[str]:
    """The table of equally many requests."""
    engines = [Engine.at(path, name, args.requests, args) for name in POLICIES]
    seconds = measured(engines, args.steps)
    lines = [
        f"{args.requests} requests of {args.context:,} tokens; a budget is {args.budget:,} tokens.",
        "",
        "| policy | ms a decode | full / this | bytes held / full |",
        "| --- | ---: | ---: | ---: |",
    ]
    for engine in engines:
        ratio, share = seconds["full"] / seconds[engine.name], engine.held_bytes / engines[0].held_bytes
        lines.append(f"| {engine.name} | {1e3 * seconds[engine.name]:.1f} | {ratio:.2f} | {share:.3f} |")
    for name in ("tova", "h2o"):
        share = 1 - seconds["local"] / seconds[name]
        lines += ["", f"Weights and scores take {share:.0%} of a decode of {name}, beside one of local."]
    return lines


def at_equal_bytes(path: Path, args: argparse.Namespace) -> list[str]:
    """The table of as many requests as the same bytes hold."""
    lines = [
        "",
        f"As many requests as the keys and values of {args.full_requests} of full attention leave room for:",
        "",
        "| policy | requests | tokens/s | this / full |",
        "| --- | ---: | ---: | ---: |",
    ]
    full = Engine.at(path, "full", args.full_requests, args)
    num_bytes, speed = full.held_bytes, 0.0
    for name in ("full", "local", "h2o"):
        engine = full
        if name != "full":
            one = Engine.at(path, name, 1, args)
            engine = Engine.at(path, name, num_bytes // one.held_bytes, args)
            assert engine.held_bytes <= num_bytes, f"{engine.held_bytes} of {num_bytes} bytes"
        tokens_s = engine.num_requests / measured([engine], args.steps)[name]
        speed = speed or tokens_s
        lines.append(f"| {name} | {engine.num_requests} | {tokens_s:.1f} | {tokens_s / speed:.2f} |")
    return lines


def main() -> None:
    """Run both comparisons and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--budget", type=int, default=3277, help="tokens that a head keeps: 20 %% of 16K")
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--full-requests", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--graphs", default="eager")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=args.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=1 << 17,
    )
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(directory)
        lines = [*decodes(Path(directory), args), *at_equal_bytes(Path(directory), args)]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    head = [
        "# Decodes of heads with a KV budget",
        "",
        f"`python -m benchmarks.budget --layers {args.layers} --steps {args.steps} --dtype {args.dtype} "
        f"--graphs {args.graphs} --requests {args.requests} --full-requests {args.full_requests}`, "
        f"{date.today()}, {torch.get_num_threads()} thread(s), {platform.machine()}, {versions}. "
        f"{args.layers} layers of 16 query and 8 KV heads of 64, hidden size 1,024; median CPU time of "
        f"{args.steps} decodes.",
        "",
    ]
    text = "\n".join([*head, *lines, ""])
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""The prefix cache on a random model of the 110M class: with it and without it, in one process.

    OMP_NUM_THREADS=1 python -m benchmarks.prefix_cache --out benchmarks/results/prefix-cache.md

Engines with and without the cache serve the same work in turn; a row gives the median ratio of their CPU
times, without over with. Every round draws new tokens, so that the cache knows nothing of it beforehand.
With ``--sparsity`` a share of the heads streams.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.cpu_systems import LAYERS, make_checkpoint, prompt, seconds
from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.modeling.loading import read_config
from hpu_duo.sampling import SamplingParams

NUM_KV_HEADS = 4
DOCUMENT = 3968
Work = Callable[[HPUDuoModel, int], None]


@dataclass
class Row:
    """One workload: ratios of CPU time, and the tokens that the cache had."""

    name: str
    ratios: list[float] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)

    def markdown(self) -> str:
        """The line of the table."""
        middle, low, high = statistics.median(self.ratios), min(self.ratios), max(self.ratios)
        return f"| {self.name} | {middle:.2f} | {low:.2f}-{high:.2f} | {max(self.hits):,} |"


def run(model: HPUDuoModel, prompts: Sequence[Sequence[int]], num_new: int) -> list[list[int]]:
    """Serve prompts at once; returns the tokens of each."""
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    return [samples[0].token_ids for samples in model.engine.generate(prompts, params)]


def together(model: HPUDuoModel, seed: int) -> None:
    """16 requests at once with 1,024 tokens in common and 64 of their own, 32 new tokens each."""
    shared = prompt(1024, seed)
    run(model, [shared + prompt(64, seed + 1 + number) for number in range(16)], 32)


def one_by_one(length: int, own: int) -> Work:
    """Eight requests, one after the other, that have some tokens in common."""

    def work(model: HPUDuoModel, seed: int) -> None:
        shared = prompt(length, seed)
        for number in range(8):
            run(model, [shared + prompt(own, seed + 1 + number)], 8)

    return work


def chat(model: HPUDuoModel, seed: int) -> None:
    """20 turns of 64 tokens, each answered by 32."""
    text: list[int] = []
    for turn in range(20):
        text += prompt(64, seed + turn)
        text += run(model, [text], 32)[0]


def unrelated(model: HPUDuoModel, seed: int) -> None:
    """16 requests of 512 tokens with nothing in common: what the cache costs where it does not help."""
    run(model, [prompt(512, seed + 500 + number) for number in range(16)], 64)


def document(model: HPUDuoModel, seed: int) -> None:
    """Eight questions of 32 tokens to a document, one after the other; read once where there is a cache."""
    text, questions = prompt(DOCUMENT, seed), [prompt(32, seed + 1 + number) for number in range(8)]
    if model.stats().prefixes is None:
        for question in questions:
            run(model, [text + question], 16)
        return
    with model.prefill(text) as context:
        for question in questions:
            params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
            model.engine.generate([context.prompt(question)], params, context=context.hold())


def files(model: HPUDuoModel, directory: Path, rounds: int) -> str:
    """Compare reading a document with saving and loading it."""
    ratios, size = [], 0
    for number in range(rounds):
        began = time.perf_counter()
        with model.prefill(prompt(DOCUMENT, 77_000 + number)) as context:
            read = time.perf_counter() - began
            began = time.perf_counter()
            context.save(directory / "document")
            saved = time.perf_counter() - began
        assert model.engine.scheduler.leases.prefixes is not None
        model.engine.scheduler.leases.prefixes.clear()
        began = time.perf_counter()
        model.load_context(directory / "document").close()
        ratios.append(read / (saved + time.perf_counter() - began))
        size = (directory / "document").stat().st_size
    return (
        f"A document of {DOCUMENT:,} tokens, {size / 2**20:.0f} MiB in its file: reading it takes "
        f"{statistics.median(ratios):.1f} times as long ({min(ratios):.1f}-{max(ratios):.1f}) as saving and "
        "loading it together, by the clock."
    )


WORKS: dict[str, Work] = {
    "16 at once, 1,024 tokens shared, 64 of their own": together,
    "8 one after the other, 1,500 of 2,200 tokens shared": one_by_one(1500, 700),
    "8 one after the other, 1,600 of 2,200 tokens shared": one_by_one(1600, 600),
    "chat of 20 turns": chat,
    "16 at once, nothing shared": unrelated,
    "8 questions to a document of 3,968 tokens, in a context": document,
}


def measure(
    path: Path, names: Sequence[str], rounds: int, sparsity: float, **options: Any
) -> tuple[list[Row], str]:
    """Serve each workload by both engines in turn; returns also what was found of files, if asked for."""
    num_layers = read_config(path).num_hidden_layers
    pattern = HeadPattern.random(num_layers, NUM_KV_HEADS, 0, sink=64, recent=256) if sparsity else None
    common = {
        "max_num_seqs": 16,
        "max_model_len": 4096,
        "max_num_batched_tokens": 2048,
        "graphs": "replay",
        **({"pattern": pattern, "sparsity": sparsity} if sparsity else {}),
        **options,
    }
    cold = HPUDuoModel.from_pretrained(path, enable_prefix_caching=False, **common)
    warm = HPUDuoModel.from_pretrained(path, **common)
    for model in (cold, warm):
        if common["graphs"] != "eager":
            model.warmup()
    rows = []
    for name in names:
        row, work = Row(name), WORKS[name]
        for number in range(rounds + 1):
            seed = 1000 * (number + 1)
            before = _hits(warm)
            with_cache = seconds(partial(work, warm, seed))
            without = seconds(partial(work, cold, seed))
            if number:  # the first round warms caches of the processor and of the allocator
                row.ratios.append(without / with_cache)
                row.hits.append(_hits(warm) - before)
        rows.append(row)
        print(row.markdown(), file=sys.stderr)
    return rows, files(warm, path, rounds) if document in map(WORKS.__getitem__, names) else ""


def _hits(model: HPUDuoModel) -> int:
    stats = model.stats().prefixes
    return 0 if stats is None else stats.num_hit_tokens


def report(rows: Sequence[Row], of_files: str, sparsity: float, rounds: int) -> str:
    """The rows as a Markdown page."""
    lines = [
        f"# The prefix cache on a CPU, {sparsity:.0%} of the heads streaming",
        "",
        f"`python -m benchmarks.prefix_cache {' '.join(sys.argv[1:])}`, {date.today()}: {rounds} rounds, "
        f"{torch.get_num_threads()} thread(s), {platform.processor() or platform.machine()}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}. CPU time without the cache over CPU "
        "time with it, and tokens that the cache had in a round.",
        "",
        "| work | without / with | range | tokens taken up |",
        "| --- | --- | --- | --- |",
        *(row.markdown() for row in rows),
        "",
        *([of_files, ""] if of_files else []),
    ]
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sparsity", type=float, default=0.0)
    parser.add_argument("--only", nargs="*", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--max-chunk-rows", type=int, default=1)
    parser.add_argument("--num-layers", type=int, default=LAYERS)
    parser.add_argument("--graphs", default="replay")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = make_checkpoint(Path(directory), NUM_KV_HEADS, asked.num_layers)
        rows, of_files = measure(
            path,
            asked.only,
            asked.rounds,
            asked.sparsity,
            max_chunk_rows=asked.max_chunk_rows,
            graphs=asked.graphs,
        )
    page = report(rows, of_files, asked.sparsity, asked.rounds)
    if asked.out is None:
        print(page)
    else:
        asked.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

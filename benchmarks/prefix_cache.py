"""The prefix cache on a random model of the 110M class: with it and without it, in one process.

    OMP_NUM_THREADS=1 python -m benchmarks.prefix_cache --out benchmarks/results/prefix-cache.md

Engines with and without the cache serve the same work in turn; a row gives the median ratio of their CPU
times, without over with. Every round of every workload draws tokens of its own, so that the cache knows
nothing of it beforehand. With ``--sparsity`` a share of the heads streams.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.cpu_systems import LAYERS, VOCAB, make_checkpoint, seconds
from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.modeling.loading import read_config
from hpu_duo.sampling import SamplingParams

NUM_KV_HEADS = 4
DOCUMENT = 3968


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


def same_tokens(answers: list[list[int]], expected: list[list[int]], dtype: str = "float32") -> int:
    """Compare the answers of one engine with those of another one; returns how many are the same.

    Args:
        dtype: of both. Only in float32 are they sure to be the same: others round more than tokens differ.

    Raises:
        ValueError: an answer has other tokens, in float32.
    """
    number = 0
    for place, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        number += answer == wanted
        if answer != wanted and dtype == "float32":
            raise ValueError(f"expected the same tokens of both engines, got other ones in {place}")
    return number


class Tokens:
    """Random tokens of one round of one workload; no two draws begin alike, in whatever round or workload.

    Args:
        name: of the workload.
        number: of the round.
    """

    def __init__(self, name: str, number: int) -> None:
        self._generator = np.random.default_rng([zlib.crc32(name.encode()), number])

    def draw(self, length: int) -> list[int]:
        """Return the next tokens."""
        return self._generator.integers(0, VOCAB, length).tolist()


@dataclass(frozen=True)
class Work:
    """A workload.

    Attributes:
        texts: makes what is said in a round: prompts, or the turns of a chat.
        serve: has an engine answer it.
    """

    texts: Callable[[Tokens], list[list[int]]]
    serve: Callable[[HPUDuoModel, list[list[int]]], None]

    def run(self, model: HPUDuoModel, name: str, number: int) -> None:
        """Serve a round, the same for every engine."""
        self.serve(model, self.texts(Tokens(name, number)))


def sharing(shared: int, own: int, num: int) -> Callable[[Tokens], list[list[int]]]:
    """Prompts that begin with the same tokens, and have some of their own."""

    def texts(tokens: Tokens) -> list[list[int]]:
        beginning = tokens.draw(shared)
        return [beginning + tokens.draw(own) for _ in range(num)]

    return texts


def at_once(num_new: int) -> Callable[[HPUDuoModel, list[list[int]]], None]:
    """Serve prompts together."""

    def serve(model: HPUDuoModel, prompts: list[list[int]]) -> None:
        run(model, prompts, num_new)

    return serve


def one_by_one(model: HPUDuoModel, prompts: list[list[int]]) -> None:
    """Serve prompts one after the other."""
    for each in prompts:
        run(model, [each], 8)


def chat(model: HPUDuoModel, turns: list[list[int]]) -> None:
    """Serve a conversation, whose turns are answered by 32 tokens each."""
    text: list[int] = []
    for turn in turns:
        text += turn
        text += run(model, [text], 32)[0]


def ask_document(model: HPUDuoModel, prompts: list[list[int]]) -> None:
    """Serve questions to a document, one after the other; it is read once where there is a cache."""
    if model.stats().prefixes is None:
        for each in prompts:
            run(model, [each], 16)
        return
    with model.prefill(prompts[0][:DOCUMENT]) as context:
        for each in prompts:
            params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
            question = context.prompt(each[DOCUMENT:])
            model.engine.generate([question], params, context=context.hold())


def files(model: HPUDuoModel, directory: Path, rounds: int) -> str:
    """Compare reading a document with saving and loading it."""
    ratios, size = [], 0
    for number in range(rounds):
        began = time.perf_counter()
        with model.prefill(Tokens("files", number).draw(DOCUMENT)) as context:
            read = time.perf_counter() - began
            began = time.perf_counter()
            context.save(directory / "document")
            saved = time.perf_counter() - began
        assert model.engine.scheduler.allocations.prefixes is not None
        model.engine.scheduler.allocations.prefixes.clear()
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
    "16 at once, 1,024 tokens shared, 64 of their own": Work(sharing(1024, 64, 16), at_once(32)),
    "8 one after the other, 1,500 of 2,200 tokens shared": Work(sharing(1500, 700, 8), one_by_one),
    "8 one after the other, 1,600 of 2,200 tokens shared": Work(sharing(1600, 600, 8), one_by_one),
    "chat of 20 turns": Work(sharing(0, 64, 20), chat),
    # What the cache costs where it does not help.
    "16 at once, nothing shared": Work(sharing(0, 512, 16), at_once(64)),
    "8 questions to a document of 3,968 tokens, in a context": Work(sharing(DOCUMENT, 32, 8), ask_document),
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
            before = _hits(warm)
            with_cache = seconds(partial(work.run, warm, name, number))
            without = seconds(partial(work.run, cold, name, number))
            if number:  # the first round warms caches of the processor and of the allocator
                row.ratios.append(without / with_cache)
                row.hits.append(_hits(warm) - before)
        rows.append(row)
        print(row.markdown(), file=sys.stderr)
    return rows, files(warm, path, rounds) if any(WORKS[name].serve is ask_document for name in names) else ""


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

"""Cost of a step when the prefix cache is full, and of the turns of a chat as it grows.

    OMP_NUM_THREADS=1 python -m benchmarks.cache_state --page benchmarks/results/prefix-cache.md

In CPU time, side by side in one process, on random models: the chat on that of ``benchmarks.cpu``, the full
cache on one whose weights are small, so that blocks that are read for nothing would show. The reference
kernels read the slice of the store up to the last block of a step, as an HPU does, so with them an idle block
between held ones costs time.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.cpu_systems import LAYERS, make_checkpoint, now, prompt
from benchmarks.first_contact.page import Page, paragraph
from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.engine.message import StepMessage
from hpu_duo.sampling import SamplingParams

_NUM_KV_HEADS, _NUM_BLOCKS, _NUM_SEQS, _NUM_NEW = 4, 128, 8, 24
_TURNS, _QUESTION, _ANSWER = 20, 64, 32


class _Decodes:
    """CPU time and unique blocks of the decodes of a run."""

    def __init__(self, model: HPUDuoModel) -> None:
        self.seconds: list[float] = []
        self.blocks: list[int] = []
        self._model, self._is_decode = model, False

    def add(self, message: StepMessage, token_ids: npt.NDArray[np.int32]) -> None:
        """Take in a step."""
        self._is_decode = str(message.bucket.phase) == "--u"
        if self._is_decode:
            self.blocks.append(message.bucket.num_unique_blocks)

    def serve(self, seed: int) -> None:
        """Serve requests of 250 tokens to their end."""
        engine = self._model.engine
        engine.step_recorder = self
        for number in range(_NUM_SEQS):
            engine.add_request(prompt(250, seed + number), _greedy(_NUM_NEW))
        while engine.has_unfinished:
            began = now()
            engine.step()
            if self._is_decode:
                self.seconds.append(now() - began)
        engine.step_recorder = None


def _small_checkpoint(directory: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=_NUM_KV_HEADS,
        intermediate_size=512,
        vocab_size=32_000,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory / "small")
    return directory / "small"


def _greedy(num_new: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)


def full_cache(path: Path, attention: str, rounds: int) -> str:
    """Return a row: decodes beside a full cache against those of an engine that has no cache."""
    limits: dict[str, Any] = {
        "max_num_seqs": _NUM_SEQS,
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "num_blocks": _NUM_BLOCKS,
        "attention": attention,
    }
    cold = HPUDuoModel.from_pretrained(path, device="cpu", enable_prefix_caching=False, **limits)
    full = HPUDuoModel.from_pretrained(path, device="cpu", **limits)
    for model in (cold, full):
        model.warmup()
    for number in range(_NUM_BLOCKS // 7 + 8):
        full.engine.generate([prompt(900, 10_000 + number)], [_greedy(1)])
    prefixes = full.stats().prefixes
    assert prefixes is not None
    ratios, blocks = [], ([0], [0])
    for number in range(rounds + 1):
        took = []
        for which, model in enumerate((cold, full)):
            decodes = _Decodes(model)
            decodes.serve(1000 * number)
            took.append(statistics.median(decodes.seconds))
            blocks[which].extend(decodes.blocks)
        ratios.append(took[1] / took[0])
    kept = ratios[1:]  # The first round warms up.
    return (
        f"| {attention} | {prefixes.num_idle_blocks} of {_NUM_BLOCKS} | {max(blocks[0])} | {max(blocks[1])} "
        f"| {statistics.median(kept):.2f} | {min(kept):.2f}-{max(kept):.2f} |"
    )


def chat(path: Path, sparsity: float) -> list[str]:
    """Return rows: CPU time to the first token of some turns, with the cache and without."""
    pattern = HeadPattern.random(LAYERS, _NUM_KV_HEADS, 0, sink=64, recent=256) if sparsity else None
    heads: dict[str, Any] = {"pattern": pattern, "sparsity": sparsity} if sparsity else {}
    limits: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 2048, "max_num_batched_tokens": 2048}
    took: list[list[float]] = []
    for is_warm in (True, False):
        model = HPUDuoModel.from_pretrained(
            path, device="cpu", enable_prefix_caching=is_warm, **limits, **heads
        )
        model.warmup()
        model.engine.generate([prompt(300, 7)], [_greedy(4)])
        took.append(_turns(model))
    return [
        f"| {sparsity:.0%} | {turn} | {(turn - 1) * (_QUESTION + _ANSWER):,} + {_QUESTION} "
        f"| {took[0][turn - 1] / took[0][0]:.2f} | {took[1][turn - 1] / took[0][0]:.2f} |"
        for turn in (1, 2, 5, 10, 15, 20)
    ]


def _turns(model: HPUDuoModel) -> list[float]:
    text: list[int] = []
    found = []
    for turn in range(_TURNS):
        text += prompt(_QUESTION, turn)
        model.engine.add_request(text, _greedy(_ANSWER))
        began, first = now(), 0.0
        while model.engine.has_unfinished:
            for output in model.engine.step():
                first = first or now() - began
                text += output.token_ids
        found.append(first)
    return found


def _section(told: str, head: str, rows: list[str]) -> str:
    machine = f"{platform.processor() or platform.machine()}, torch {torch.__version__}"
    text = paragraph(f"`python -m benchmarks.cache_state`, {date.today()}, {machine}.", told)
    columns = "| --- |" + " ---: |" * (head.count("|") - 2)
    return "\n".join([text, "", head, columns, *rows])


def main() -> None:
    """Print both sections, or write them into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page", type=Path, help="Markdown page to write the sections into")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small, path = _small_checkpoint(Path(folder)), make_checkpoint(Path(folder), _NUM_KV_HEADS)
        rows = [full_cache(small, attention, options.rounds) for attention in ("reference", "sdpa")]
        turns = [row for sparsity in (0.0, 0.5) for row in chat(path, sparsity)]
    sections = {
        "Decodes beside a full cache": _section(
            f"{_NUM_SEQS} requests of 250 tokens decode beside a cache that holds all blocks that they do "
            "not need. *Slice* is the largest number of unique blocks that a decode's bucket has, without a "
            "cache and beside the full one; the ratio is CPU time of a median decode beside the full cache "
            f"by that of an engine without one, {options.rounds} rounds.",
            "| kernels | idle blocks | slice without | slice beside | ratio | range |",
            rows,
        ),
        f"A chat of {_TURNS} turns": _section(
            f"Each turn adds {_QUESTION} tokens, and {_ANSWER} are answered. CPU time until the first token "
            "of a turn, by that of the first turn with the cache.",
            "| streaming | turn | tokens before + new | with the cache | without |",
            turns,
        ),
    }
    page = Page.read(options.page) if options.page is not None else Page("")
    for title, text in sections.items():
        print(f"## {title}\n\n{text}\n", flush=True)
        page = page.with_section(title, text)
    if options.page is not None:
        options.page.write_text(str(page), encoding="utf-8")


if __name__ == "__main__":
    main()

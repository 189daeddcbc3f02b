"""Quality of each format of keys and values: divergence, perplexity, passkeys.

    python -m benchmarks.kv_formats --stories DIR --out benchmarks/results/kv-formats.md

The built-in model reads documents of its own language, the other checkpoint (karpathy's stories260K in the
layout of transformers) stories that it has written itself. Both run in float32 on a CPU, with full attention
and with half of the KV heads streaming.
"""

from __future__ import annotations

import argparse
import math
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpu_duo import HeadPattern, HPUDuoModel, SamplingParams
from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.lab.eval.interval import wilson
from hpu_duo.lab.eval.model_under_test import Subject
from hpu_duo.lab.eval.passkey import PasskeyTask, passkey_accuracy

FORMATS = (
    *("auto", "bfloat16", "int8_per_token_head", "fp8", "fp8_per_token_head", "k8v4"),
    *("int4_per_token_head", "fp8:int4_per_token_head"),
)
NUM_TEXTS, TEXT_LEN, BLOCK, DECODE_LEN = 12, 193, 32, 16
PASSKEYS = PasskeyTask(768, num_documents=4, num_passkeys=8)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stories", type=Path, required=True, help="directory of stories260K")
    parser.add_argument("--out", type=Path, help="Markdown file; default: standard output")
    options = parser.parse_args()
    text = "\n".join(_page(options.stories)) + "\n"
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text)


def _page(stories: Path) -> Iterator[str]:
    yield from (
        "# Formats of keys and values: divergence, perplexity and passkeys",
        "",
        "Made by `python -m benchmarks.kv_formats --stories DIR` on "
        f"{platform.machine()}, torch {torch.__version__}, in float32.",
        f"{NUM_TEXTS} texts of {TEXT_LEN - 1} scored tokens: documents of the built-in model's language, and",
        "stories that stories260K has written itself at temperature 1. *KL* is the mean divergence of the",
        "next token's distribution from that of the same heads with keys and values in float32, in nats,",
        "with a 95 % interval over texts (bootstrap). *Passkeys* are exact answers of",
        f"{PASSKEYS.num_documents * PASSKEYS.num_passkeys}, in documents of {PASSKEYS.num_tokens:,}",
        "tokens, with a 95 % interval (Wilson). Rings of streaming heads are in float32 in all rows.",
        "",
        "| model | heads | format | bytes of a token | KL | interval | perplexity | passkeys | interval |",
        "| --- | --- | --- | ---: | ---: | --- | ---: | ---: | --- |",
    )
    half = HeadPattern(
        np.zeros((5, 4), np.float32), sink=4, recent=60, retrieval=np.tile([True, False], (5, 2))
    )
    builtin = {"pattern": PATTERN_DIR, "sparsity": 0.5}
    for name, path, streams in (
        ("built-in", MODEL_DIR, builtin),
        ("stories260K", stories, {"pattern": half}),
    ):
        texts = _texts(path, is_own=path != MODEL_DIR)
        for heads, chosen in (("full", {}), ("50 %", streams)):
            yield from _rows(name, path, heads, chosen, texts)


def _load(path: Path, **options: Any) -> HPUDuoModel:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "block_size": BLOCK, "decode_len": DECODE_LEN}
    return HPUDuoModel.from_pretrained(path, dtype="float32", device="cpu", **{**sizes, **options})


def _texts(path: Path, *, is_own: bool) -> list[list[int]]:
    model = _load(path, decode_len=1)
    if is_own:
        params = [
            SamplingParams(temperature=1.0, seed=seed, max_tokens=TEXT_LEN - 1, ignore_eos=True)
            for seed in range(NUM_TEXTS)
        ]
        return [[1, *done[0].token_ids] for done in model.engine.generate([[1]] * NUM_TEXTS, params)]
    subject = Subject(model)
    task = PasskeyTask(TEXT_LEN + 64, num_documents=NUM_TEXTS, num_passkeys=1, seed=1)
    return [subject.encode(each.text, is_start=True)[:TEXT_LEN] for each in task.documents(subject)]


def _rows(
    name: str, path: Path, heads: str, chosen: dict[str, Any], texts: Sequence[Sequence[int]]
) -> Iterator[str]:
    exact: list[np.ndarray] = []
    for kv_format in FORMATS:
        model = _load(path, kv_cache_dtype=kv_format, max_model_len=TEXT_LEN + 8, **chosen)
        found = [_logprobs(model, text) for text in texts]
        exact = exact or found
        divergences = [
            float((np.exp(old) * (old - new)).sum(-1).mean()) for old, new in zip(exact, found, strict=True)
        ]
        scored = [new[np.arange(len(new)), text[1:]] for new, text in zip(found, texts, strict=True)]
        low, high = _bootstrap(divergences)
        plan = model.engine.runner.store.plan
        cells = [name, heads, f"`{kv_format}`", f"{plan.block_bytes / BLOCK:,.0f}"]
        cells += [f"{np.mean(divergences):.2e}", f"{low:.1e} to {high:.1e}"]
        cells += [
            f"{math.exp(-float(np.mean(np.concatenate(scored)))):.4f}",
            *_passkeys(path, kv_format, chosen),
        ]
        yield f"| {' | '.join(cells)} |"


def _passkeys(path: Path, kv_format: str, chosen: dict[str, Any]) -> tuple[str, str]:
    if path != MODEL_DIR:
        return "", ""
    model = _load(path, kv_cache_dtype=kv_format, enable_prefix_caching=True, **chosen)
    found = passkey_accuracy(Subject(model), PASSKEYS)
    low, high = wilson(found.accuracy, found.num_answers)
    return f"{found.num_exact}", f"{low:.0%} to {high:.0%}"


def _logprobs(model: HPUDuoModel, text: Sequence[int]) -> np.ndarray:
    """Log-probabilities ``[tokens, V]`` of each next token of a text, by decodes."""
    size = model.config.get_text_config().vocab_size
    after = tuple(text[1:])
    params = SamplingParams(
        temperature=0.0,
        logprobs=size,
        max_tokens=len(after),
        ignore_eos=True,
        forced_token_ids=after,
        decoded_prompt_tokens=1,
    )
    [[done]] = model.engine.generate([list(text[:1])], params)
    found = np.empty((len(after), size))
    for place, one in enumerate(done.logprobs):
        found[place, list(one.top)] = list(one.top.values())
    return found


def _bootstrap(values: Sequence[float], num: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of a mean."""
    drawn = np.random.default_rng(0).choice(values, (num, len(values)))
    low, high = np.percentile(drawn.mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


if __name__ == "__main__":
    main()

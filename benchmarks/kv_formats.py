"""Quality of each format of keys and values: divergence, perplexity, passkeys.

    python -m benchmarks.kv_formats --stories DIR --out benchmarks/results/kv-formats.md

The built-in model reads documents of its own language, the other checkpoint (karpathy's stories260K in the
layout of transformers) stories that it has written itself. Both run in float32 on a CPU, with full attention
and with half of the KV heads streaming, and with what is combined with formats: weights of 8 bits, formats of
rings, and H2O.
"""

from __future__ import annotations

import argparse
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from hpu_duo import HeadPattern, HPUDuoModel, SamplingParams
from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.lab.eval.interval import wilson
from hpu_duo.lab.eval.model_under_test import Subject
from hpu_duo.lab.eval.passkey import PasskeyTask, passkey_accuracy
from kernels_ref.formats import int8

INT4, INT8, PLAIN = "int4_per_token_head", "int8_per_token_head", "auto"
FORMATS = (PLAIN, "bfloat16", INT8, "fp8", "fp8_per_token_head", "k8v4", INT4, f"fp8:{INT4}")
BLOCK = DECODE_LEN = 32
NUM_TOKENS = 1 << 16
"""Scored tokens of each model in all."""
PASSKEYS = PasskeyTask(768, num_documents=8, num_passkeys=8)
FIRST = PasskeyTask(2048, num_documents=64, num_passkeys=1, depths=(0.0,))
HELD = 1024
"""Tokens that the memory of the last table holds in bfloat16."""


@dataclass(frozen=True)
class Case:
    """A model with its texts.

    Attributes:
        name: in tables.
        path: of the checkpoint.
        text_len: tokens of a text, of which all but the first are scored.
        half: settings with which half of the KV heads stream.
        num_combined: texts of the tables after the first one.
    """

    name: str
    path: Path
    text_len: int
    half: Mapping[str, Any]
    num_combined: int

    @property
    def is_builtin(self) -> bool:
        """Whether it knows passkeys."""
        return self.path == MODEL_DIR

    def load(self, **options: Any) -> HPUDuoModel:
        """Serve it."""
        sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "block_size": BLOCK}
        sizes = {**sizes, "dtype": "float32", "device": "cpu", "decode_len": DECODE_LEN}
        return HPUDuoModel.from_pretrained(self.path, **{**sizes, **options})

    def texts(self, num_tokens: int) -> list[list[int]]:
        """Texts with that many scored tokens together, or a few more."""
        count = -(-num_tokens // (self.text_len - 1))
        model = self.load(decode_len=1, max_num_seqs=32)
        if not self.is_builtin:
            params = [
                SamplingParams(temperature=1.0, seed=seed, max_tokens=self.text_len - 1, ignore_eos=True)
                for seed in range(count)
            ]
            return [[1, *done[0].token_ids] for done in model.engine.generate([[1]] * count, params)]
        subject = Subject(model)
        task = PasskeyTask(self.text_len + 64, num_documents=count, num_passkeys=1, seed=1)
        return [subject.encode(each.text, is_start=True)[: self.text_len] for each in task.documents(subject)]


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stories", type=Path, required=True, help="directory of stories260K")
    parser.add_argument("--out", type=Path, help="Markdown file; default: standard output")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="scored tokens of each model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for line in _page(options.stories, options.tokens):
        print(line, flush=True)
        lines.append(line)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


def _page(stories: Path, num_tokens: int) -> Iterator[str]:
    half = HeadPattern(
        np.zeros((5, 4), np.float32), sink=4, recent=60, retrieval=np.tile([True, False], (5, 2))
    )
    cases = (
        Case("built-in", MODEL_DIR, 1025, {"pattern": PATTERN_DIR, "sparsity": 0.5}, 64),
        Case("stories260K", stories, 505, {"pattern": half}, 32),
    )
    texts = {case.name: case.texts(num_tokens) for case in cases}
    counts = " and ".join(f"{len(texts[case.name])} of {case.text_len - 1:,} ({case.name})" for case in cases)
    answers = PASSKEYS.num_documents * PASSKEYS.num_passkeys
    yield from (
        "# Formats of keys and values: divergence, perplexity and passkeys",
        "",
        f"Made by `python -m benchmarks.kv_formats --stories DIR --tokens {num_tokens}` on "
        f"{platform.machine()}, torch {torch.__version__}, in float32.",
        f"Scored tokens: texts of {counts}: documents of the built-in model's language, and stories that",
        "stories260K has written itself at temperature 1. *KL* is the mean divergence of the next token's",
        "distribution from that of the first row of its group, in nats, with a 95 % interval over texts",
        f"(bootstrap). *Passkeys* are exact answers of {answers}, in documents of {PASSKEYS.num_tokens:,}",
        "tokens, with a 95 % interval (Wilson). *Bytes of a token* are those of one more token in blocks;",
        "*bytes of a row*, of the rings or budgets of one request. Tables after the first have the first "
        f"{cases[0].num_combined} and {cases[1].num_combined} texts.",
    )
    yield from _title("One format", "format")
    for case in cases:
        for heads, chosen in (("full", {}), ("50 %", case.half)):
            rows = [(f"{heads} | `{name}`", {**chosen, "kv_cache_dtype": name}) for name in FORMATS]
            yield from _rows(case, texts[case.name], rows)
    yield from _title("Combined", "weights, keys and values, rings or budgets")
    for case in cases:
        yield from _rows(case, texts[case.name][: case.num_combined], list(_combined(case)))
    yield from _bound(cases[1], texts["stories260K"][: cases[1].num_combined])
    yield from _fitting(cases[0])


def _title(title: str, what: str) -> tuple[str, ...]:
    return (
        *("", f"## {title}", ""),
        f"| model | heads | {what} | bytes of a token | bytes of a row | KL | interval | perplexity "
        "| passkeys | interval |",
        "| --- | --- | --- | ---: | ---: | ---: | --- | ---: | ---: | --- |",
    )


def _combined(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    h2o = {"kv_policy": "h2o", "kv_budget": 0.2, "kv_chunk": BLOCK, "decode_len": 1, "max_num_seqs": 32}
    for weights, stored, rings, heads, chosen in (
        ("float32", PLAIN, PLAIN, "full", {}),
        ("int8", INT8, PLAIN, "full", {}),
        ("int8", INT4, PLAIN, "full", {}),
        ("float32", PLAIN, PLAIN, "50 %", case.half),
        ("int8", INT4, PLAIN, "50 %", case.half),
        ("int8", INT4, INT4, "50 %", case.half),
        ("float32", PLAIN, PLAIN, "H2O, 20 %", h2o),
        ("float32", PLAIN, INT8, "H2O, 20 %", h2o),
        ("float32", PLAIN, INT4, "H2O, 20 %", h2o),
    ):
        options = {"kv_cache_dtype": stored, "ring_dtype": rings, **chosen}
        if weights != "float32":
            options["quantization"] = weights
        yield f"{heads} | {weights}, `{stored}`, `{rings}`", options


def _rows(
    case: Case, texts: Sequence[Sequence[int]], rows: Sequence[tuple[str, Mapping[str, Any]]]
) -> Iterator[str]:
    exact: list[np.ndarray] = []
    for label, options in rows:
        sizes = {"max_model_len": case.text_len + 7}
        model = case.load(**{"enable_prefix_caching": False, **sizes, **options})
        found = _logprobs(model, texts)
        exact = exact or found
        divergence, interval, perplexity = _quality(exact, found, texts)
        plan = model.engine.runner.store.plan
        cells = [case.name, label, f"{plan.block_bytes / BLOCK:,.0f}", f"{plan.row_bytes:,}"]
        cells += [divergence, interval, perplexity, *_passkeys(case, options)]
        yield f"| {' | '.join(cells)} |"


def _quality(
    exact: Sequence[np.ndarray], found: Sequence[np.ndarray], texts: Sequence[Sequence[int]]
) -> tuple[str, str, str]:
    """Return divergence, its interval, and perplexity."""
    divergences, scored = [], []
    for old, new, text in zip(exact, found, texts, strict=True):
        log_p, log_q = old.astype(np.float64), new.astype(np.float64)
        divergences.append(float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()))
        scored.append(log_q[np.arange(len(new)), text[1:]])
    low, high = _bootstrap(divergences)
    perplexity = math.exp(-float(np.mean(np.concatenate(scored))))
    return f"{np.mean(divergences):.2e}", f"{low:.1e} to {high:.1e}", f"{perplexity:.4f}"


def _bound(case: Case, texts: Sequence[Sequence[int]]) -> Iterator[str]:
    """Parts of the divergence of int8 in heads of 8: keys, values, the scale's rounding, and the codes'."""
    yield from (
        *("", "## What int8 costs in heads of 8 (stories260K, full attention)", ""),
        "| keys : values | scale | codes | KL | interval |",
        "| --- | --- | --- | ---: | --- |",
    )
    exact: list[np.ndarray] = []
    for stored, scale, most in (
        ("float32", torch.bfloat16, 127),
        (INT8, torch.bfloat16, 127),
        (f"{INT8}:float32", torch.bfloat16, 127),
        (f"float32:{INT8}", torch.bfloat16, 127),
        (INT8, torch.float32, 127),
        (INT8, torch.float32, 63),
        (INT8, torch.float32, 31),
    ):
        rounded = {"SCALE": scale, "as_scale": lambda x, kept=scale: x.clamp(min=1e-30).to(kept)}
        with patch.multiple(int8, MOST_CODE=most, **rounded):
            model = case.load(kv_cache_dtype=stored, enable_prefix_caching=False)
            found = _logprobs(model, texts)
        exact = exact or found
        divergence, interval, _ = _quality(exact, found, texts)
        kept = "" if stored == "float32" else str(scale).removeprefix("torch.")
        yield f"| `{stored}` | {kept} | {2 * most + 1 if kept else ''} | {divergence} | {interval} |"


def _fitting(case: Case) -> Iterator[str]:
    """Tokens that fit in the memory of ``HELD`` tokens in bfloat16, and passkeys at their beginnings."""
    yield from (
        *("", f"## Texts that fit where bfloat16 holds {HELD:,} tokens (built-in model, full attention)", ""),
        f"Passkeys at the beginning of {FIRST.num_documents} documents of {FIRST.num_tokens:,} tokens, with",
        "as much memory as they need.",
        "",
        "| format | tokens that fit | times bfloat16 | passkeys | interval |",
        "| --- | ---: | ---: | ---: | --- |",
    )
    held = 0
    for name in ("bfloat16", INT8, INT4):
        model = case.load(kv_cache_dtype=name, max_model_len=3072, max_num_seqs=2)
        block_bytes = model.engine.runner.store.plan.block_bytes
        held = held or block_bytes * HELD // BLOCK
        fit = held // block_bytes * BLOCK
        found = passkey_accuracy(Subject(model), FIRST)
        low, high = wilson(found.accuracy, found.num_answers)
        yield (
            f"| `{name}` | {fit:,} | {fit / HELD:.2f} | {found.num_exact} of {found.num_answers} | "
            f"{low:.0%} to {high:.0%} |"
        )


def _passkeys(case: Case, options: Mapping[str, Any]) -> tuple[str, str]:
    if not case.is_builtin:
        return "", ""
    model = case.load(**{"max_model_len": 1024, **options})
    found = passkey_accuracy(Subject(model), PASSKEYS)
    low, high = wilson(found.accuracy, found.num_answers)
    return f"{found.num_exact}", f"{low:.0%} to {high:.0%}"


def _logprobs(model: HPUDuoModel, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Log-probabilities ``[tokens, V]`` of each next token of texts of one length, by decodes.

    Texts are decoded alone where a row decodes several tokens in a step, else some at a time, in step.
    """
    limits = model.engine.scheduler.limits
    at_once = 1 if limits.decode_len > 1 else limits.max_num_seqs
    some = (texts[begin : begin + at_once] for begin in range(0, len(texts), at_once))
    return [each for batch in some for each in _at_once(model, batch)]


def _at_once(model: HPUDuoModel, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    count, step_model = len(texts), model.engine.runner.model
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=len(text) - 1,
            ignore_eos=True,
            forced_token_ids=tuple(text[1:]),
            decoded_prompt_tokens=1,
        )
        for text in texts
    ]
    logits, found = step_model.logits, []

    def kept(*given: Any) -> torch.Tensor:
        found.append(logits(*given).clone())
        return found[-1]

    with patch.object(step_model, "logits", kept):
        model.engine.generate([list(text[:1]) for text in texts], params)
    assert count == 1 or all(len(each) == count for each in found), "all requests are in all steps"
    whole = torch.cat(found).unflatten(0, (-1, count)).transpose(0, 1)[:, : len(texts[0]) - 1]
    return [each.double().log_softmax(-1).float().numpy() for each in whole]


def _bootstrap(values: Sequence[float], num: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of a mean."""
    drawn = np.random.default_rng(0).choice(values, (num, len(values)))
    low, high = np.percentile(drawn.mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


if __name__ == "__main__":
    main()

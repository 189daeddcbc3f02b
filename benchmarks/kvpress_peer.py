"""Beside kvpress: the same model, documents and budgets; accuracy, bytes really held, CPU time.

    python -m venv V && V/bin/pip install kvpress==0.5.5
    python benchmarks/kvpress_peer.py --kvpress-python V/bin/python --out benchmarks/results/kvpress.md

Both answer the same questions of the built-in model, teacher-forced, an answer being exact if each of its
tokens is the likeliest. kvpress reads the whole prompt with full attention and cuts the cache once; the
engine holds the budget all the time and goes on evicting while it decodes. Bytes of kvpress are those of the
tensors in its cache behind the prompt, bytes of the engine what it leases at the end of an answer.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR
from hpu_duo.builtin.rehearsed import Rehearsals
from hpu_duo.eval import PasskeyQuestions, PasskeyTask, Subject
from hpu_duo.eval.interval import wilson

WORKER = Path(__file__).parent / "engine_workers" / "kvpress_passkeys.py"
PAIRS = {
    "h2o": "ObservedAttentionPress",
    "tova": "TOVAPress",
    "streaming-llm": "StreamingLLMPress",
    "local": None,
    "snapkv": "SnapKVPress",
    "expected attention": "ExpectedAttentionPress",
}
"""Policies by our names, and the presses that come nearest; either may be without the other."""
OURS = ("h2o", "tova", "streaming-llm", "local")
FULL = "full attention"


def tasks(args: argparse.Namespace) -> dict[str, PasskeyTask]:
    """Passkeys anywhere, and passkeys that were asked for before."""
    sizes = (args.num_tokens, args.num_documents, args.num_passkeys, args.passkey_words)
    return {
        "passkeys": PasskeyTask(*sizes),
        "passkeys asked for before": PasskeyTask(*sizes, rehearsals=Rehearsals(4)),
    }


def load(policy: str | None, budget: int) -> Subject:
    """The built-in model with a policy; None is full attention."""
    options: dict[str, Any] = {} if policy is None else {"kv_policy": policy, "kv_budget": float(budget)}
    return Subject(
        HPUDuoModel.from_pretrained(MODEL_DIR, max_num_seqs=8, enable_prefix_caching=False, **options)
    )


def ours(args: argparse.Namespace, written: dict[str, PasskeyQuestions]) -> Iterator[dict[str, Any]]:
    """Rows of this engine."""
    for share, policy in [(1.0, None), *((share, name) for share in args.budgets for name in OURS)]:
        subject = load(policy, int(share * args.num_tokens))
        for task, questions in written.items():
            began = time.process_time()
            found = questions.ask(subject)
            yield {
                "task": task,
                "budget": share,
                "policy": policy or FULL,
                "system": "hpu-duo",
                "num_answers": found.num_answers,
                "num_exact": found.num_exact,
                "kv_ratio": found.kv.ratio,
                "cpu_s": time.process_time() - began,
            }


def theirs(
    args: argparse.Namespace, written: dict[str, PasskeyQuestions], full: int
) -> Iterator[dict[str, Any]]:
    """Rows of kvpress.

    Args:
        full: bytes of one token in the full cache.
    """
    runs = [(None, 0.0)]
    runs += [(press, 1.0 - share) for share in args.budgets for press in PAIRS.values() if press is not None]
    names = {press: name for name, press in PAIRS.items()} | {None: FULL}
    for task, questions in written.items():
        documents = [
            {
                "prompt": list(prompt),
                "questions": [
                    [list(ids[: len(ids) - size]), list(ids[len(ids) - size :])]
                    for ids, size in zip(asked, sizes, strict=True)
                ],
            }
            for prompt, asked, sizes in zip(
                questions.prompts, questions.continuations, questions.answer_lengths, strict=True
            )
        ]
        work = {
            "model": str(MODEL_DIR),
            "documents": documents,
            "runs": runs,
            "version": args.kvpress_version,
        }
        done = subprocess.run(
            [args.kvpress_python, WORKER], input=json.dumps(work), capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"kvpress failed:\n{done.stderr[-3000:]}")
        num_bytes = full * sum(len(prompt) for prompt in questions.prompts)
        for line in done.stdout.splitlines():
            row = json.loads(line)
            yield {
                "task": task,
                "budget": round(1.0 - row["ratio"], 3),
                "policy": names[row["name"]],
                "system": row["versions"],
                "num_answers": row["num_answers"],
                "num_exact": row["num_exact"],
                "kv_ratio": row["held_bytes"] / num_bytes,
                "cpu_s": row["cpu_s"],
            }


def table(rows: Sequence[dict[str, Any]], task: str) -> str:
    """One line per budget and policy, both systems side by side."""
    own = [row for row in rows if row["task"] == task]
    keys = dict.fromkeys((row["budget"], row["policy"]) for row in sorted(own, key=lambda row: row["budget"]))
    lines = [
        "| kept | policy | hpu-duo: exact | bytes | CPU s | kvpress: exact | bytes | CPU s |",
        "| --- |" * 1 + " --- |" * 7,
    ]
    for budget, policy in keys:
        found = [row for row in own if (row["budget"], row["policy"]) == (budget, policy)]
        cells = [_cells(found, is_ours) for is_ours in (True, False)]
        lines.append(f"| {budget:.0%} | {policy} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def _cells(rows: Sequence[dict[str, Any]], is_ours: bool) -> str:
    for row in rows:
        if (row["system"] == "hpu-duo") is is_ours:
            share = row["num_exact"] / row["num_answers"]
            low, high = wilson(share, row["num_answers"])
            return f"{share:.3f} ({low:.2f} to {high:.2f}) | {row['kv_ratio']:.1%} | {row['cpu_s']:.1f}"
    return "| |"


def report(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> str:
    """The results as a page."""
    versions = next(row["system"] for row in rows if row["system"] != "hpu-duo")
    parts = [
        f"## {task[0].upper()}{task[1:]}\n\n{table(rows, task)}"
        for task in dict.fromkeys(r["task"] for r in rows)
    ]
    return f"""# Beside kvpress

{__doc__.split(chr(10) + chr(10), 2)[2].strip()}

Documents of {args.num_tokens:,} tokens with {args.num_passkeys} passkeys of {args.passkey_words} words, all
asked for; {rows[0]["num_answers"]} answers in each cell, 95 % intervals. Bytes are shares of the full cache
of the same tokens.

{(chr(10) * 2).join(parts)}

{date.today()}, hpu-duo with torch {torch.__version__}, beside {versions}, on one thread of a CPU
({platform.machine()}), one run each, machine shared: times tell orders of magnitude only.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kvpress-python", type=Path, required=True, help="Python that has kvpress")
    parser.add_argument("--num-tokens", type=int, default=1500)
    parser.add_argument("--num-documents", type=int, default=4)
    parser.add_argument("--num-passkeys", type=int, default=4)
    parser.add_argument("--passkey-words", type=int, default=8)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.2, 0.5])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    query = "import importlib.metadata as m; print(m.version('kvpress'))"
    args.kvpress_version = subprocess.check_output([args.kvpress_python, "-c", query], text=True).strip()
    subject = load(None, 0)
    written = {name: PasskeyQuestions.write(subject, task) for name, task in tasks(args).items()}
    rows = []
    for row in (*theirs(args, written, subject.kv_bytes(1).full), *ours(args, written)):
        rows.append(row)
    text = report(args, rows)
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

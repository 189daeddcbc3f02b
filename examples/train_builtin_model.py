"""Train the built-in model from scratch on a CPU, score its heads, and measure what it can do.

    python examples/train_builtin_model.py build         # everything, into hpu_duo/builtin/{model,pattern}
    python examples/train_builtin_model.py evaluate      # the tables of docs/builtin-model.md

The package must be installed (``pip install -e .``). ``build`` can be interrupted and started again: it
resumes from ``--work-dir``. It needs torch >= 2.9 (for ``torch.optim.Muon``), about half an hour of one CPU
core with bfloat16 instructions, and no GPU.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from builtin_training.batches import BatchMaker, Task
from builtin_training.evaluation import measure_accuracy
from builtin_training.export import export, load
from builtin_training.head_scores import HeadScorer, Mask, plan_of
from builtin_training.tokenizer import build_tokenizer
from builtin_training.training import CURRICULUM, Trainer

from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.heads.pattern import HeadPattern

app = typer.Typer(add_completion=False, help="Train, score and measure the built-in model.")

ModelDir = Annotated[Path, typer.Option(help="Directory of the model.")]
PatternDir = Annotated[Path, typer.Option(help="Directory of the head pattern.")]
Threads = Annotated[int, typer.Option(help="CPU threads; the shipped files were made with one.")]


@app.command()
def build(
    model_dir: ModelDir = MODEL_DIR,
    pattern_dir: PatternDir = PATTERN_DIR,
    work_dir: Annotated[Path, typer.Option(help="Where the training checkpoint is kept.")] = Path(
        "build/builtin"
    ),
    seed: Annotated[int, typer.Option(help="Fixes initialisation, data and masks.")] = 0,
    threads: Threads = 1,
) -> None:
    """Train, export and score: from nothing to the two shipped directories."""
    _set_up(threads)
    work_dir.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(BatchMaker(build_tokenizer()), seed, work_dir / f"seed{seed}.pt")
    trainer.run(CURRICULUM)
    export(trainer.model, model_dir)
    score(model_dir, pattern_dir, threads=threads)


@app.command()
def score(
    model_dir: ModelDir = MODEL_DIR,
    pattern_dir: PatternDir = PATTERN_DIR,
    orders: Annotated[int, typer.Option(help="Random orders in which heads are switched on.")] = 6,
    threads: Threads = 1,
) -> None:
    """Measure the score of every KV head and write the pattern directory."""
    _set_up(threads)
    scorer = HeadScorer(load(model_dir, torch.bfloat16), BatchMaker(build_tokenizer()))
    pattern = scorer.shapley(orders)
    pattern.save(pattern_dir)
    print("Shapley scores (layers x KV heads):", pattern.scores.round(4), sep="\n")
    print("Loss of probability, one head removed:", scorer.ablation().round(4), sep="\n")


@app.command()
def evaluate(
    model_dir: ModelDir = MODEL_DIR,
    pattern_dir: PatternDir = PATTERN_DIR,
    lengths: Annotated[
        str, typer.Option(help="Sequence lengths in tokens, comma separated.")
    ] = "512,1024,2048,4096",
    answers: Annotated[int, typer.Option(help="Answers per length and head choice, at least.")] = 128,
    output: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
    threads: Threads = 1,
) -> None:
    """Exact match (8 passkeys of 16 words): all heads full, by the pattern, inverted, all streaming."""
    _set_up(threads)
    model, batches = load(model_dir, torch.bfloat16), BatchMaker(build_tokenizer())
    choices = _head_choices(HeadPattern.load(pattern_dir))
    rows = []
    for num_tokens in (int(length) for length in lengths.split(",")):
        task = Task(num_tokens, batch_size=1, num_passkeys=(8, 8), passkey_words=(16, 16))
        num_batches = -(-answers // batches.make(task, seed=0).num_answers)
        for name, retrieval_LK in choices.items():
            plan = None if retrieval_LK is None else plan_of(retrieval_LK)
            measured = measure_accuracy(model, batches, task, num_batches, plan)
            rows.append({"num_tokens": num_tokens, "heads": name, **asdict(measured)})
            print(
                f"T={num_tokens} {name}: exact match {measured.exact_match:.3f}, token accuracy "
                f"{measured.token_accuracy:.3f}, {measured.num_answers} answers",
                flush=True,
            )
    if output is not None:
        output.write_text(json.dumps(rows, indent=2) + "\n")


def _head_choices(pattern: HeadPattern) -> dict[str, Mask | None]:
    """Name -> retrieval heads; None is plain full attention."""
    half = pattern.binarise(sparsity=0.5).mask
    return {
        "full attention": None,
        **{f"pattern, {s:.0%} streaming": pattern.binarise(sparsity=s).mask for s in (0.25, 0.5, 0.75)},
        "inverted pattern, 50% streaming": ~half,
        "all streaming": half & ~half,
    }


def _set_up(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


if __name__ == "__main__":
    app()

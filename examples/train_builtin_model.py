"""Train the built-in model from scratch, score its heads, and measure what it can do.

    python examples/train_builtin_model.py build         # everything, into hpu_duo/builtin/{model,pattern}
    python examples/train_builtin_model.py evaluate      # the tables of docs/builtin-model.md

The package must be installed (``pip install -e .``). ``build`` can be interrupted and started again: it
resumes from ``--work-dir``. It needs torch >= 2.9 (for ``torch.optim.Muon``), about half an hour of one CPU
core with bfloat16 instructions, and no GPU.

Larger models are trained in the same way; sizes and device are options. One of 108 million parameters:

    python examples/train_builtin_model.py build --device cuda --layers 12 --hidden-size 768 \
        --intermediate-size 3072 --heads 12 --kv-heads 6 --lr 0.3 \
        --model-dir build/large/model --pattern-dir build/large/pattern --work-dir build/large

No such run has been made; the learning rate that suits it has to be found.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from builtin_training.batches import BatchMaker, Task
from builtin_training.evaluation import measure_accuracy
from builtin_training.export import export, load
from builtin_training.head_scores import HeadScorer, Mask, plan_of
from builtin_training.initialisation import SHIPPED, Shape
from builtin_training.tokenizer import build_tokenizer
from builtin_training.training import CURRICULUM, Trainer

from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.heads.pattern import FINGERPRINT_KEY, NAME_KEY, HeadPattern
from hpu_duo.lab.eval.interval import wilson
from hpu_duo.modeling.hub import model_fingerprint, model_name

app = typer.Typer(add_completion=False, help="Train, score and measure the built-in model.")

ModelDir = Annotated[Path, typer.Option(help="Directory of the model.")]
PatternDir = Annotated[Path, typer.Option(help="Directory of the head pattern.")]
Threads = Annotated[int, typer.Option(help="CPU threads; the shipped files were made with one.")]
Device = Annotated[str, typer.Option(help="cpu or cuda; the shipped files were made on a CPU.")]


@app.command()
def build(
    model_dir: ModelDir = MODEL_DIR,
    pattern_dir: PatternDir = PATTERN_DIR,
    work_dir: Annotated[Path, typer.Option(help="Where the training checkpoint is kept.")] = Path(
        "build/builtin"
    ),
    seed: Annotated[int, typer.Option(help="Fixes initialisation, data and masks.")] = 0,
    threads: Threads = 1,
    device: Device = "cpu",
    layers: Annotated[int, typer.Option(help="Layers.")] = SHIPPED.num_layers,
    hidden_size: Annotated[int, typer.Option(help="Channels of the residual stream.")] = SHIPPED.hidden_size,
    intermediate_size: Annotated[int, typer.Option(help="Channels of the MLP.")] = SHIPPED.intermediate_size,
    heads: Annotated[int, typer.Option(help="Query heads.")] = SHIPPED.num_heads,
    kv_heads: Annotated[int, typer.Option(help="KV heads, at least 4.")] = SHIPPED.num_kv_heads,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.")] = SHIPPED.head_dim,
    lr: Annotated[float, typer.Option(help="Factor on the learning rates of the shipped model.")] = 1.0,
    steps: Annotated[float, typer.Option(help="Factor on the steps of each stage.")] = 1.0,
) -> None:
    """Train, export and score: from nothing to the two shipped directories."""
    shape = Shape(layers, hidden_size, intermediate_size, heads, kv_heads, head_dim)
    if shape != SHIPPED and (model_dir == MODEL_DIR or pattern_dir == PATTERN_DIR):
        raise typer.BadParameter(
            "expected --model-dir and --pattern-dir with other sizes than the shipped ones"
        )
    _set_up(threads)
    work_dir.mkdir(parents=True, exist_ok=True)
    maker = BatchMaker(build_tokenizer())
    trainer = Trainer(maker, seed, work_dir / f"seed{seed}.pt", shape, device, lr)
    trainer.run(tuple(replace(one, num_steps=max(1, round(one.num_steps * steps))) for one in CURRICULUM))
    export(trainer.model, model_dir, shape)
    score(model_dir, pattern_dir, threads=threads, device=device)


@app.command()
def score(
    model_dir: ModelDir = MODEL_DIR,
    pattern_dir: PatternDir = PATTERN_DIR,
    orders: Annotated[int, typer.Option(help="Random orders in which heads are switched on.")] = 6,
    threads: Threads = 1,
    device: Device = "cpu",
) -> None:
    """Measure the score of every KV head and write the pattern directory."""
    _set_up(threads)
    scorer = HeadScorer(load(model_dir, torch.bfloat16, device), BatchMaker(build_tokenizer()))
    pattern = scorer.shapley(orders)
    origin = {NAME_KEY: model_name(model_dir), FINGERPRINT_KEY: model_fingerprint(model_dir)}
    pattern = replace(pattern, config={**origin, **pattern.config})
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
    device: Device = "cpu",
) -> None:
    """Exact match (8 passkeys of 16 words): all heads full, by the pattern, inverted, all streaming."""
    _set_up(threads)
    model, batches = load(model_dir, torch.bfloat16, device), BatchMaker(build_tokenizer())
    choices = _head_choices(HeadPattern.load(pattern_dir))
    rows = []
    for num_tokens in (int(length) for length in lengths.split(",")):
        task = Task(num_tokens, batch_size=1, num_passkeys=(8, 8), passkey_words=(16, 16))
        num_batches = -(-answers // batches.make(task, seed=0).num_answers)
        for name, retrieval_LK in choices.items():
            plan = None if retrieval_LK is None else plan_of(retrieval_LK)
            measured = measure_accuracy(model, batches, task, num_batches, plan)
            rows.append({"num_tokens": num_tokens, "heads": name, **asdict(measured)})
            low, high = wilson(measured.exact_match, measured.num_answers)
            print(
                f"T={num_tokens} {name}: exact match {measured.exact_match:.3f} ({low:.3f} to {high:.3f}), "
                f"token accuracy {measured.token_accuracy:.3f}, {measured.num_answers} answers",
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

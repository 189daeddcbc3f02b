"""Find the retrieval heads of the built-in model with trained gates, then let all other heads stream.

python examples/identify_heads.py

One to three minutes of a CPU core. ``hpu-duo identify`` does the same on the command line, and draws.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer

from hpu_duo import HeadPattern, HPUDuoModel, SamplingParams
from hpu_duo.builtin import MODEL_DIR
from hpu_duo.lab.identify import (
    DatasetSettings,
    Form,
    Identification,
    IdentifyRequest,
    Schedule,
    TrainingSettings,
    Workers,
)
from hpu_duo.lab.tasks.passkeys import document, question, token_counter

SINK, RECENT, SPARSITY = 16, 64, 0.75


def main(
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 40,
    max_length: Annotated[int, typer.Option(help="Tokens of the longest document to learn from.")] = 512,
    num_tokens: Annotated[int, typer.Option(help="Tokens of the document to answer about.")] = 1500,
) -> None:
    """Train gates on short documents, then serve a longer one with the pattern found."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as directory:
        pattern = identify(Path(directory) / "heads", steps, max_length)
    found = pattern.binarise(sparsity=SPARSITY)
    heads = [f"{layer}.{head}" for layer, head in zip(*found.mask.nonzero())]
    print(f"retrieval heads (layer.head): {', '.join(heads)}")
    model = HPUDuoModel.from_pretrained(MODEL_DIR, pattern=found, max_num_seqs=4)
    print(f"passkeys found with the other heads streaming: {ask(model, num_tokens)} of 4")


def identify(output: Path, steps: int, max_length: int) -> HeadPattern:
    """One run of the optimisation; its files go to ``output``."""
    data = DatasetSettings(
        min_length=max_length // 2, max_length=max_length, num_passkeys=4, passkey_words=5, form=Form.NAMES
    )
    # A short run needs longer steps than the published 0.02 over 2,000.
    training = TrainingSettings(Schedule(lr=0.06, num_steps=steps))
    request = IdentifyRequest(
        MODEL_DIR, output, dataset=data, sink=SINK, recent=RECENT, training=training, dtype="float32"
    )
    run = Identification(request, Workers())
    for progress in run.run():
        if progress.losses is not None and progress.done % 10 == 0:
            print(f"step {progress.done} of {progress.total}, loss {progress.losses.total:.4f}", flush=True)
    run.write()
    return run.pattern()


def ask(model: HPUDuoModel, num_tokens: int) -> int:
    """Count the passkeys, out of four, that the model finds in one document."""
    tokenizer = model.tokenizer
    assert tokenizer is not None, "the built-in model has a tokenizer"
    written = document(token_counter(tokenizer), num_tokens, num_passkeys=4, passkey_words=4, seed=0)
    prompts = [tokenizer(written.text + question(one))["input_ids"] for one in written.passkeys]
    answers = model.engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8))
    told = [samples[0].text.strip() for samples in answers]
    return sum(text == one.answer.strip() for text, one in zip(told, written.passkeys))


if __name__ == "__main__":
    typer.run(main)

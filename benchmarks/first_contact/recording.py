"""Time that sampling the shapes of steps, and watching their padding, takes of a step.

    python -m benchmarks.first_contact recording

Takes a minute on one core.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch

from benchmarks.first_contact.page import paragraph
from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR
from hpu_duo.sampling import SamplingParams

TITLE = "Cost of sampling shapes"
NUM_TOKENS, NUM_ROUNDS = 250, 15


def report() -> Iterator[str]:
    """Lines of the section."""
    torch.set_num_threads(1)
    model = HPUDuoModel.from_pretrained(MODEL_DIR, max_model_len=1024, max_num_seqs=1, graphs="replay")
    shapes = model.engine._stepper.telemetry.shapes
    add = shapes.add
    spent: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(2 * NUM_ROUNDS + 2):
        name = ("with", "without")[number % 2]
        shapes.add = add if name == "with" else _nothing  # type: ignore[method-assign]
        seconds = _seconds_per_step(model)
        if number > 1:
            spent[name].append(seconds)
    alone = _alone(add, model)
    medians = {name: median(seconds) * 1e6 for name, seconds in spent.items()}
    yield from (
        paragraph(
            f"""
            `python -m benchmarks.first_contact recording`. Every engine keeps a sample of at most
            8,192 shapes, and compares the padding of windows of 2,048 steps with what its table
            promises. The built-in model, which has the shortest steps there are, decodes one
            request on one core, with and without, in turns; medians of {NUM_ROUNDS} rounds of
            {NUM_TOKENS} tokens, process time. {processor()}, torch {torch.__version__}.
            """
        ),
        "",
        "| a decode step with | without | difference | the same call alone |",
        "| ---: | ---: | ---: | ---: |",
        f"| {medians['with']:.0f} µs | {medians['without']:.0f} µs | "
        f"{medians['with'] / medians['without'] - 1:+.1%} | {alone * 1e6:.1f} µs |",
    )


def _seconds_per_step(model: HPUDuoModel) -> float:
    before = model.stats().num_steps
    began = time.process_time()
    model.engine.generate([[1, 2, 3]], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    return (time.process_time() - began) / (model.stats().num_steps - before)


def _alone(add: Callable[..., None], model: HPUDuoModel) -> float:
    bucket = model.engine.runner.graphs.table.by_cost[0]
    times = 100_000
    began = time.process_time()
    for _ in range(times):
        add(bucket, bucket)
    return (time.process_time() - began) / times


def processor() -> str:
    """The name of the processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _nothing(shape: object, bucket: object) -> None:
    """Take no note."""

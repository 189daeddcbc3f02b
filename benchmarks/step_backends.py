"""Time of decode steps of a 110M model by capture backend, in this process's instruction set.

    python -m benchmarks.step_backends
    export HPU_DUO_X86_KERNELS=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2  # for AVX2

Backends take turns; a line has the median milliseconds of CPU of "replay", and for each other backend the
median ratio to it of a round: above 1 "replay" is faster. "not fused" replays without fused elementwise
programs. Compiling takes tens of seconds for a number of rows, hence ``--compile``; on a restricted CPU give
it a folder of its own in TORCHINDUCTOR_CACHE_DIR.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.cpu_systems import make_checkpoint, prompt, seconds
from graphs.backends.base import CaptureBackend
from graphs.backends.replay import ReplayBackend
from hpu_duo import HPUDuoModel, SamplingParams

CONTEXT = 128
NUM_STEPS = 8
NUM_FIRST = 12
NUM_KV_HEADS = 4


def opened(path: Path, graphs: str | CaptureBackend, num_rows: int, num_new: int) -> HPUDuoModel:
    """A model whose rows decode, after the first steps."""
    model = HPUDuoModel.from_pretrained(
        path,
        device="cpu",
        graphs=graphs,
        max_num_seqs=num_rows,
        max_model_len=CONTEXT + num_new + 1,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    for number in range(num_rows):
        model.engine.add_request(prompt(CONTEXT, number), params)
    for _ in range(NUM_FIRST):  # prompts, and captures that take several runs
        model.engine.step()
    return model


def steps(model: HPUDuoModel) -> None:
    """Run some decode steps."""
    for _ in range(NUM_STEPS):
        model.engine.step()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32], help="rows of a step")
    parser.add_argument("--rounds", type=int, default=9, help="rounds, each backend once in each")
    parser.add_argument("--compile", action="store_true", help="time graphs='compile' as well")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = ["not fused", "eager", *(["compile"] if args.compile else [])]
    print(f"| kernels | rows | replay, ms | {' | '.join(names)} |\n|{' --- |' * (3 + len(names))}")
    with tempfile.TemporaryDirectory() as directory:
        path = make_checkpoint(Path(directory), NUM_KV_HEADS)
        for num_rows in args.rows:
            num_new = NUM_STEPS * (args.rounds + 2) + NUM_FIRST
            models = {
                name: opened(path, ReplayBackend() if name == "not fused" else name, num_rows, num_new)
                for name in ("replay", *names)
            }
            times: dict[str, list[float]] = {name: [] for name in models}
            for number in range(args.rounds + 1):
                for name, model in models.items():
                    took = seconds(partial(steps, model))
                    if number:
                        times[name].append(1e3 * took / NUM_STEPS)
            ours = times["replay"]
            ratios = [f"{median(x / y for x, y in zip(times[name], ours)):.2f}" for name in names]
            kernels = models["replay"].stats().resolved.kernels
            print(f"| {kernels} | {num_rows} | {median(ours):.1f} | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main()

"""Side by side on a CPU: this engine at two commits, on the random 110M model of ``benchmarks.cpu``.

    git worktree add ../before COMMIT
    python -m benchmarks.two_commits ../before --starts 6 --rounds 4

Each commit serves in a process of its own, one at a time. Rounds alternate which of them goes first, since
the second finds other caches; and both are started several times, in turns, since where a process finds its
memory makes some percent. The line of medians by start tells how much: compare it with that of one commit
against itself. Compared is CPU time of one thread, which other users of the machine disturb
least; a ratio above 1 says that the present commit takes longer.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpu_duo import HPUDuoModel

_STEPS, _PROMPT = 30, 1024
_LINES = ("decode", "prefill", "mixed")


def main() -> None:
    """Print a table of ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="checkout of the commit to compare with")
    parser.add_argument("--starts", type=int, default=6, help="pairs of processes")
    parser.add_argument("--rounds", type=int, default=4, help="of each pair")
    parser.add_argument("--graphs", default="compile", help="of both engines")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.graphs)
        return
    from benchmarks.cpu_systems import make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder), 12)
        print("\n".join(compare(options.before, model, options.graphs, options.starts, options.rounds)))


def compare(before: Path, model: Path, graphs: str, starts: int, rounds: int) -> list[str]:
    """Lines of the table."""
    now = Path(__file__).parents[1]
    ratios: dict[str, list[list[float]]] = {name: [] for name in _LINES}
    for number in range(starts):
        roots = (before, now) if number % 2 else (now, before)
        processes = {root: _start(root, model, graphs) for root in roots}
        for name in _LINES:
            ratios[name].append(_rounds(processes[before], processes[now], name, rounds))
        for process in processes.values():
            process.communicate(timeout=60)
    lines = ["| work | median ratio | range | medians by start |", "| --- | ---: | ---: | --- |"]
    for name, by_start in ratios.items():
        every = [ratio for each in by_start for ratio in each]
        medians = ", ".join(f"{statistics.median(each):.3f}" for each in by_start)
        lines.append(
            f"| {name} | {statistics.median(every):.3f} | {min(every):.2f}-{max(every):.2f} | {medians} |"
        )
    return lines


def _rounds(before: subprocess.Popen[str], now: subprocess.Popen[str], name: str, rounds: int) -> list[float]:
    """Ratios of one pair of processes; a further round warms them up."""
    ratios = []
    for number in range(rounds + 1):
        order = (before, now) if number % 2 else (now, before)
        took = {process.pid: _ask(process, name) for process in order}
        ratios.append(took[now.pid] / took[before.pid])
    return ratios[1:]


def _start(root: Path, model: Path, graphs: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(root), "--graphs", graphs, "--serve", str(model)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, env=environment, cwd=root, text=True, **pipes)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"expected an engine of {root}, and its process ended with {process.wait()}")
    return process


def _ask(process: subprocess.Popen[str], name: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{name}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def serve(path: Path, graphs: str) -> None:
    """Carry out what standard input names, and print its seconds of CPU time."""
    import time

    import torch

    from hpu_duo import HPUDuoModel

    torch.set_num_threads(1)
    model = HPUDuoModel.from_pretrained(
        path, device="cpu", max_num_seqs=8, max_model_len=2048, max_num_batched_tokens=512, graphs=graphs
    )
    works: dict[str, Callable[[HPUDuoModel], None]]
    works = {"decode": _decode, "prefill": _prefill, "mixed": _mixed}
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.process_time()
        works[line.strip()](model)
        print(time.process_time() - began, flush=True)


def _decode(model: HPUDuoModel) -> None:
    _run(model, [(128, _STEPS)])


def _prefill(model: HPUDuoModel) -> None:
    _run(model, [(_PROMPT, 1)])


def _mixed(model: HPUDuoModel) -> None:
    _run(model, [(32 * (number + 1), 10 + number) for number in range(7)] + [(_PROMPT, 4)])


_DRAW = random.Random(0)


def _run(model: HPUDuoModel, requests: list[tuple[int, int]]) -> None:
    from hpu_duo.sampling import SamplingParams

    for length, new in requests:
        # Other tokens each time: nothing is taken from a prefix cache.
        tokens = [_DRAW.randrange(3, 30_000) for _ in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        model.engine.add_request(tokens, params)
    while model.engine.has_unfinished:
        model.engine.step()


if __name__ == "__main__":
    main()

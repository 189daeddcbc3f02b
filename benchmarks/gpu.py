"""The CUDA path measured: kernels against others', and the DuoAttention curves in real shapes.

    python -m benchmarks.gpu                      # all sections, on the current CUDA device
    python -m benchmarks.gpu --only decode        # one section; finished points are kept
    python -m benchmarks.gpu --toy --device cpu --out /tmp/gpu     # everything on toy sizes, anywhere
    python -m benchmarks.gpu --device cpu --only memory balance   # what is computed, in real sizes

Each point is saved as soon as it is there, so that a run can be stopped, or end at ``--seconds``, and the
same command continues it; what could not be measured is tried again then. A file holds one device and one
set of versions. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from benchmarks.gpu_suite.clock import Clock
from benchmarks.gpu_suite.results import Results, describe_environment
from benchmarks.gpu_suite.shapes import REAL, TOY, Sizes
from graphs.atomic_file import replace_file

COMPUTED = ("memory", "balance")
SECTIONS = ("machine", *COMPUTED, "offload", "kernels", "formats", "budget", "decode", "prefill")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, print the report, and write it, the points and the figures."""
    options = _parser().parse_args(arguments)
    sizes = TOY if options.toy else REAL
    if options.contexts:
        sizes = replace(sizes, decode_contexts=tuple(options.contexts))
    if options.chunks:
        sizes = replace(sizes, prefill_chunks=tuple(options.chunks))
    try:
        device = _device(options.device)
        stem = options.out / f"gpu-{'toy-' if options.toy else ''}{options.date}"
        # What must not be mixed in one file: the machine, the versions, and how the curves are run.
        environment = describe_environment(device, is_toy=options.toy)
        environment |= {"attention": _attention(options.attention, device), "graphs": options.graphs}
        results = Results(stem.with_suffix(".json"), environment)
        is_complete = _measure(options, sizes, device, results)
    except ValueError as error:
        sys.exit(f"gpu.py: {error}")
    from benchmarks.gpu_suite.report import write_report

    command = ["python", "-m", "benchmarks.gpu", *(sys.argv[1:] if arguments is None else arguments)]

    def write(figures: Sequence[Path]) -> str:
        text = write_report(results, sizes, options.date, command, [path.name for path in figures])
        stem.parent.mkdir(parents=True, exist_ok=True)
        replace_file(stem.with_suffix(".md"), text)
        return text

    # Drawing may fail: the report is there before it, and again with the figures.
    text = write([])
    print(text)
    if not is_complete:
        print(f"Stopped after {options.seconds:g} s; the same command goes on from here.")
    if not options.no_figures:
        from benchmarks.gpu_suite.figures import draw_figures

        write(draw_figures(results, sizes, stem))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--toy", action="store_true", help="sizes that a CPU does in seconds")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ..., or cpu together with --toy")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results")
    parser.add_argument("--date", default=date.today().isoformat(), help="in the names of the files")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no curve point after so long")
    parser.add_argument(
        "--contexts", type=int, nargs="+", help="tokens before the decodes of the decode curve"
    )
    parser.add_argument("--chunks", type=int, nargs="+", help="prompt tokens of a step of the prefill curve")
    parser.add_argument("--rounds", type=int, help="timed calls of a kernel (30; 2 for --toy)")
    parser.add_argument("--attention", default="auto", help="kernels of the curves")
    parser.add_argument("--graphs", default="eager", help="capture backend of the decode curve")
    parser.add_argument("--no-figures", action="store_true", help="do without matplotlib")
    return parser


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"expected a device such as cuda, cuda:1 or cpu, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"expected a CUDA device, got none for {name!r}; try --toy --device cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _attention(name: str, device: torch.device) -> str:
    """Choose Triton or an error for "auto" on CUDA: figures of portable kernels would be mistaken for its."""
    return "triton" if name == "auto" and device.type == "cuda" else name


def _measure(options: argparse.Namespace, sizes: Sizes, device: torch.device, results: Results) -> bool:
    if device.type == "cpu" and not options.toy and not set(options.only) <= set(COMPUTED):
        raise ValueError(
            f"expected --toy together with --device cpu, got real sizes; "
            f"only {' and '.join(COMPUTED)} are computed without a GPU"
        )
    # Where kernels are interpreted, bfloat16 is slow and says nothing more.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    few = 2 if options.toy else 30
    clock = Clock(device, few if options.rounds is None else options.rounds, warm_up=0 if options.toy else 5)
    # Here and not above: Triton reads TRITON_INTERPRET when it is imported.
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from benchmarks.gpu_suite.balance import count_balance
    from benchmarks.gpu_suite.curves import Budget, measure_decode, measure_prefill
    from benchmarks.gpu_suite.engines import Setup
    from benchmarks.gpu_suite.host_tier import measure_host_tier
    from benchmarks.gpu_suite.kernels import measure_budget, measure_formats, measure_kernels
    from benchmarks.gpu_suite.machine import measure_machine
    from benchmarks.gpu_suite.memory import compute_memory

    attention = _attention(options.attention, device)
    setup = Setup(device, dtype, attention, options.graphs, sizes.block_size)
    budget = Budget.start(options.seconds)
    if "machine" in options.only:
        measure_machine(clock, sizes, dtype, results)
    if "memory" in options.only:
        compute_memory(sizes, torch.bfloat16.itemsize, results)
    if "balance" in options.only:
        count_balance(sizes, results)
    if "offload" in options.only:
        measure_host_tier(clock, sizes, dtype, results)
    if "kernels" in options.only:
        measure_kernels(clock, sizes, dtype, results)
    if "formats" in options.only:
        measure_formats(clock, sizes, dtype, results)
    if "budget" in options.only:
        measure_budget(clock, sizes, dtype, results)
    is_complete = True
    if "decode" in options.only:
        is_complete = measure_decode(clock, sizes, setup, results, budget)
    if "prefill" in options.only:
        is_complete = measure_prefill(clock, sizes, setup, results, budget) and is_complete
    return is_complete


if __name__ == "__main__":
    main()

"""Whole steps and memory of a random 110M Llama with quantised weights against bfloat16 ones, on this CPU.

    python -m benchmarks.quantised_model --out PAGE

Every round runs all formats one after the other, so a loaded machine slows all of them; with one thread CPU
time is counted. ``w8a8`` is a checkpoint of int8 that states inputs in int8 of each token. Memory is that of
a process of its own for each format: the peak up to the end of a request, less what imports take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_systems import make_checkpoint, now, prompt
from benchmarks.quantised_linears import arithmetic
from hpu_duo import HPUDuoModel
from hpu_duo.modeling.quantised.writer import quantise_checkpoint
from hpu_duo.sampling import SamplingParams
from kernels_ref.x86.library import cpu_flags, description

FORMATS = ("bf16", "int8", "w8a8", "int4")


def options_of(name: str, path: Path) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for a format."""
    if name == "w8a8":
        return {"path": path.parent / "w8a8"}
    return {"path": path, **({} if name == "bf16" else {"quantization": name})}


def make_w8a8(path: Path) -> None:
    """A checkpoint of int8 that states how inputs are rounded."""
    out = path.parent / "w8a8"
    quantise_checkpoint(path, out, "int8")
    file = out / "config.json"
    config = json.loads(file.read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = {
            **{"num_bits": 8, "type": "int", "strategy": "token"},
            **{"dynamic": True, "symmetric": True},
        }
    file.write_text(json.dumps(config))


def served(name: str, path: Path, rows: int, length: int, tokens: int) -> HPUDuoModel:
    """A loaded model."""
    options = options_of(name, path)
    return HPUDuoModel.from_pretrained(
        options.pop("path"),
        device="cpu",
        graphs="auto",
        enable_prefix_caching=False,
        max_num_seqs=rows,
        max_model_len=length,
        max_num_batched_tokens=tokens,
        **options,
    )


def run(model: HPUDuoModel, prompts: list[list[int]], news: list[int]) -> float:
    """Seconds to serve prompts to the end."""
    began = now()
    for tokens, new in zip(prompts, news, strict=True):
        model.engine.add_request(tokens, SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True))
    while model.engine.has_unfinished:
        model.engine.step()
    return now() - began


def decode(path: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of a decode step of one row with about 64 tokens of context."""
    models = {name: served(name, path, 1, 4096, 64) for name in FORMATS}
    for model in models.values():
        params = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
        model.engine.add_request(prompt(32, 1), params)
        for _ in range(8):
            model.engine.step()

    def some(model: HPUDuoModel) -> float:
        began = now()
        for _ in range(16):
            model.engine.step()
        return (now() - began) / 16

    return in_turn(models, some, rounds)


def mixed(path: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of 32 requests of mixed lengths."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(32, 512, (32,), generator=generator).tolist()
    news = torch.randint(16, 128, (32,), generator=generator).tolist()
    prompts = [prompt(length, 10 + i) for i, length in enumerate(lengths)]
    models = {name: served(name, path, 32, 1024, 2048) for name in FORMATS}
    return in_turn(models, lambda model: run(model, prompts, news), rounds)


def prefill(path: Path, rounds: int, length: int = 8192) -> dict[str, list[float]]:
    """Seconds of a prompt up to its first token."""
    models = {name: served(name, path, 1, length + 8, length) for name in FORMATS}
    return in_turn(models, lambda model: run(model, [prompt(length, 2)], [1]), rounds)


def in_turn(
    models: dict[str, HPUDuoModel], work: Callable[[HPUDuoModel], float], rounds: int
) -> dict[str, list[float]]:
    """Seconds of all formats in each round, after one that is not counted."""
    for model in models.values():
        work(model)
    times: dict[str, list[float]] = {name: [] for name in FORMATS}
    for _ in range(rounds):
        for name, model in models.items():
            times[name].append(work(model))
    return times


def resident(field: str = "VmRSS") -> int:
    """Resident bytes of this process: now, or with "VmHWM" the most there were."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


def peak(name: str, path: Path) -> None:
    """Print bytes of this process: the peak less imports, and the weights'."""
    before = resident()
    model = served(name, path, 1, 256, 64)
    run(model, [prompt(32, 1)], [8])
    print(json.dumps([resident("VmHWM") - before, resident() - before, model.stats().resolved.weight_bytes]))


SCENARIOS = {"decode step, one row": decode, "32 mixed requests": mixed, "prompt of 8192": prefill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=[*SCENARIOS, "memory"], default=[*SCENARIOS, "memory"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.peak:
        peak(given.peak, given.path)
        return
    has_vnni = "avx512_vnni" in cpu_flags()
    lines = [f"{description(arithmetic())}; {given.threads} thread; avx512_vnni: {has_vnni}", ""]
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder), 12)
        make_w8a8(path)
        lines += ["| | " + " | ".join(FORMATS) + " |", "| --- |" + " --- |" * len(FORMATS)]
        for title in (each for each in given.only if each in SCENARIOS):
            times = SCENARIOS[title](path, given.rounds)
            cells = [
                f"{min(times[name]) * 1e3:.1f} ms, "
                f"{statistics.median(a / b for a, b in zip(times['bf16'], times[name], strict=True)):.2f}"
                for name in FORMATS
            ]
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
        for name in FORMATS if "memory" in given.only else ():
            command = [
                sys.executable,
                "-m",
                "benchmarks.quantised_model",
                "--peak",
                name,
                "--path",
                str(path),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            most, after, weights = json.loads(done.stdout.strip().splitlines()[-1])
            lines.append(
                f"{name}: peak {most / 1e6:.0f} MB, at the end {after / 1e6:.0f} MB, "
                f"weights {weights / 1e6:.1f} MB"
            )
            print(lines[-1], flush=True)
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Side by side on CPU: transformers' ``generate`` and this engine on random models of the 110M class.

    python -m benchmarks.cpu --out benchmarks/results/cpu.md

Every scenario runs both systems alternately in one process, so the ratio of a round compares
neighbours in time; the table gives the median ratio and its range over the rounds. With one thread,
CPU time of the process is compared, which other users of the machine disturb least. Weights are
random: only speed and memory are measured, and both systems generate the same number of tokens.
In "32 mixed requests" transformers runs one left-padded batch until the longest output is done,
which is how its ``generate`` serves many prompts.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

import torch
import transformers

from benchmarks.cpu_systems import LAYERS, Baseline, Ours, make_checkpoint, prompt, seconds
from hpu_duo import HeadPattern
from kernels_ref.x86 import library


@dataclass
class Row:
    """One line of the table: ``ratios[i]`` is baseline seconds over ours in round ``i``."""

    scenario: str
    model: str
    baseline: str
    ratios: list[float] = field(default_factory=list)
    extra: dict[str, float] = field(default_factory=dict)

    def markdown(self) -> str:
        """The line."""
        median, low, high = statistics.median(self.ratios), min(self.ratios), max(self.ratios)
        extra = ", ".join(f"{name} {value:.3g}" for name, value in self.extra.items())
        ratio = f"{median:.2f} | {low:.2f}-{high:.2f}"
        return f"| {self.scenario} | {self.model} | {self.baseline} | {ratio} | {extra} |"


def decode_row(path: Path, context: int, new: int, rounds: int) -> Row:
    """Single-stream decode at a context; both prompts stay open, so a round times decoding alone."""
    total = (rounds + 1) * new + 2
    base = Baseline(path)
    ours = Ours(path, max_num_seqs=1, max_model_len=context + total, max_tokens=min(4096, context))
    tokens = prompt(context, 1)
    base.open(tokens)
    ours.open(tokens, total)
    row = Row(f"decode at {context}", path.name, base.name)
    base.decode(new)
    ours.decode(new)
    for _ in range(rounds):
        theirs, mine = base.decode(new), ours.decode(new)
        row.ratios.append(theirs / mine)
    return row


def static_row(path: Path, context: int, new: int, rounds: int) -> Row:
    """Single-stream decode against transformers' static cache."""
    base = Baseline(path, "static")
    ours = Ours(path, max_num_seqs=1, max_model_len=context + (rounds + 1) * new + 2, max_tokens=context)
    tokens = prompt(context, 1)
    ours.open(tokens, (rounds + 1) * new + 2)
    ours.decode(new)
    row = Row(f"decode at {context}", path.name, base.name)
    for _ in range(rounds):
        times = base.generate([tokens], new + 1)
        row.ratios.append((times[-1] - times[0]) / ours.decode(new))
    return row


def prefill_row(path: Path, length: int, rounds: int, cache: str = "dynamic") -> Row:
    """A long prompt up to its first token."""
    base = Baseline(path, cache)
    ours = Ours(path, max_num_seqs=1, max_model_len=length + 8, max_tokens=length)
    prompts = [prompt(length, 2)]
    ours.run([prompt(length, 3)], 1)
    row = Row(f"prefill of {length}", path.name, base.name)
    for _ in range(rounds):
        theirs = seconds(lambda: base.generate(prompts, 1))
        row.ratios.append(theirs / seconds(lambda: ours.run(prompts, 1)))
    return row


def mixed_row(path: Path, rounds: int, cache: str = "dynamic") -> Row:
    """32 requests of mixed prompt and output lengths; transformers runs them as one padded batch."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(32, 512, (32,), generator=generator).tolist()
    news = torch.randint(16, 128, (32,), generator=generator).tolist()
    prompts = [prompt(length, 10 + i) for i, length in enumerate(lengths)]
    base = Baseline(path, cache)
    ours = Ours(path, max_num_seqs=32, max_model_len=1024, max_tokens=2048)
    ours.model.warmup()
    row = Row("32 mixed requests", path.name, base.name)
    for _ in range(rounds):
        theirs = seconds(lambda: base.generate(prompts, max(news)))
        row.ratios.append(theirs / seconds(lambda: ours.run(prompts, news)))
    stats = ours.model.stats()
    row.extra["padding"] = stats.padding
    row.extra["host ms a step"] = ours.host_ms_per_step(lambda: ours.run(prompts, 48))
    return row


def streaming_row(path: Path, num_kv_heads: int, context: int, new: int, rounds: int) -> Row:
    """Decode with 25 % retrieval heads against full attention, both in this engine."""
    length = context + (rounds + 1) * new + 2
    options = {"max_num_seqs": 1, "max_model_len": length, "max_tokens": 4096}
    full = Ours(path, **options)  # type: ignore[arg-type]
    pattern = HeadPattern.random(LAYERS, num_kv_heads, 0, sink=64, recent=256)
    duo = Ours(path, pattern=pattern, sparsity=0.75, **options)  # type: ignore[arg-type]
    tokens = prompt(context, 5)
    row = Row(f"decode at {context}, 25 % retrieval heads", path.name, "this engine, full attention")
    for system in (full, duo):
        system.open(tokens, (rounds + 1) * new + 2)
        system.decode(new)
    for _ in range(rounds):
        row.ratios.append(full.decode(new) / duo.decode(new))
    row.extra["KV bytes, full / ours"] = full.model.stats().held_bytes / duo.model.stats().held_bytes
    return row


def kernels_in_use() -> str:
    """Name the code that multiplies bfloat16 here."""
    return library.description() if library.is_available() else "torch's own"


def report(rows: list[Row], threads: int) -> str:
    """The dated markdown report."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    amx = "with AMX" if torch.cpu._is_amx_tile_supported() else "without AMX"
    command = " ".join(["python -m benchmarks.cpu", *sys.argv[1:]])
    lines = [
        f"# CPU side by side, {date.today().isoformat()}",
        "",
        f"`{command}` on {cpu} ({torch.backends.cpu.get_cpu_capability()}, {amx}), {threads} thread(s),",
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__},",
        f"bfloat16, kernels: {kernels_in_use()}.",
        f"Ratios of {'CPU' if threads == 1 else 'wall'} time; above 1 this engine is faster.",
        "",
        "| scenario | model | against | ratio (median) | range | also |",
        "| --- | --- | --- | --- | --- | --- |",
        *(row.markdown() for row in rows),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the chosen scenarios and print, and optionally write, the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("decode", "mixed", "decode-8k", "prefill-8k", "streaming")
    parser.add_argument("--only", nargs="*", choices=names, default=list(names))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="markdown file; a JSON file is written beside it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print(row.markdown(), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        gqa, mha = make_checkpoint(Path(folder), 4), make_checkpoint(Path(folder), 12)
        if "decode" in args.only:
            for path in (gqa, mha):
                add(decode_row(path, 128, 32, args.rounds))
                add(static_row(path, 128, 32, args.rounds))
        if "mixed" in args.only:
            for cache in ("dynamic", "static"):
                add(mixed_row(gqa, args.rounds, cache))
        if "decode-8k" in args.only:
            for path in (gqa, mha):
                add(decode_row(path, 8192, 8, args.rounds))
            add(static_row(gqa, 8192, 8, args.rounds))
        if "prefill-8k" in args.only:
            for path, cache in ((gqa, "dynamic"), (gqa, "static"), (mha, "dynamic")):
                add(prefill_row(path, 8192, args.rounds, cache))
        if "streaming" in args.only:
            add(streaming_row(mha, 12, 16_384, 8, args.rounds))
    text = report(rows, args.threads)
    print(text)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
        args.out.with_suffix(".json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Main claims of papers on scheduling, repeated by ``hpu-duo simulate``.

    python -m benchmarks.simulate_claims --out benchmarks/results/simulate.md

Each claim is one command, whose picture lies beside the page. Steps take the time that the cost model
predicts for Llama-3.1-8B on one Gaudi 2; no card was measured, so figures compare policies and promise no
milliseconds. They follow from the seed: the same command gives the same figures.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from graphs import StepCost, StepLimits
from hpu_duo.cli.app import app
from hpu_duo.lab.simulate.report import RunReport
from hpu_duo.lab.simulate.server import SimulatedServer
from hpu_duo.lab.traces import Arrival, Session

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
SERVED = "--hardware gaudi2 --max-model-len 16384 --max-num-batched-tokens 2048"
PREFIX_LEN, OWN_LEN, OUTPUT_LEN, ROWS = 3000, 64, 64, 8
PROMPT_LEN, ANSWER_LEN, FAIR_ROWS = 256, 256, 32
QUANTUM = 4096

Run = Mapping[str, Any]
Runs = Mapping[str, Run]

COLUMNS: dict[str, tuple[str, Callable[[Run], str]]] = {
    "tokens": ("tokens/s", lambda run: f"{run['total_token_throughput']:,.0f}"),
    "ttft": ("TTFT mean, s", lambda run: f"{run['mean_ttft_ms'] / 1000:,.2f}"),
    "ttft99": ("TTFT p99, s", lambda run: f"{run['p99_ttft_ms'] / 1000:,.1f}"),
    "tpot99": ("TPOT p99, ms", lambda run: f"{run['p99_tpot_ms']:,.0f}"),
    "latency": ("s per output token, mean", lambda run: f"{run['mean_latency_per_token_ms'] / 1000:,.3f}"),
    "latency99": ("p99", lambda run: f"{run['p99_latency_per_token_ms'] / 1000:,.2f}"),
    "wait": ("longest wait, s", lambda run: f"{run['longest_wait']:,.1f}"),
    "hits": ("prefix hits", lambda run: f"{run['prefix_hit_rate']:.0%}"),
    "difference": ("largest difference", lambda run: f"{run['largest_service_difference']:,.0f}"),
    "duration": ("duration, s", lambda run: f"{run['duration']:,.0f}"),
}


@dataclass(frozen=True)
class Claim:
    """A claim and the command that shows it.

    Attributes:
        name: of the picture.
        title, claim: for the page.
        arguments: of ``hpu-duo simulate``.
        policies: to run, side by side.
        columns: names of ``COLUMNS``.
        verdict: a sentence from the runs, by policy.
    """

    name: str
    title: str
    claim: str
    arguments: str
    policies: tuple[str, ...]
    columns: tuple[str, ...]
    verdict: Callable[[Runs], str]

    @property
    def command(self) -> str:
        """The command as a user writes it."""
        return f"hpu-duo simulate --model DIR {self.arguments} --scheduling-policy {' '.join(self.policies)}"

    def run(self, model: Path, picture: Path) -> list[dict[str, Any]]:
        """Run the command and draw its picture; returns a result for each policy."""
        words = ["simulate", "--model", str(model), *self.arguments.split()]
        words += ["--scheduling-policy", *self.policies, "--plot", str(picture), "--json"]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        if done.exit_code:
            raise SystemExit(f"{self.command}: {done.stderr}")
        runs: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
        return runs

    def page(self, runs: Sequence[Run], picture: Path) -> list[str]:
        """The section of the page."""
        heads = [COLUMNS[name][0] for name in self.columns]
        lines = [f"## {self.title}", "", self.claim, "", "```", self.command, "```", ""]
        lines += [f"| policy | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
        for run in runs:
            cells = [COLUMNS[name][1](run) for name in self.columns]
            lines.append(f"| {run['scheduling_policy']} | {' | '.join(cells)} |")
        by_policy = {run["scheduling_policy"]: run for run in runs}
        return [*lines, "", self.verdict(by_policy), "", f"![{self.title}]({picture.name})", ""]


def ratio(runs: Runs, over: str, under: str, field: str) -> float:
    """A figure of one policy over that of another one."""
    return float(runs[over][field] / runs[under][field])


def growth(run: Run, share: float) -> float:
    """Largest difference of service by a share of the run."""
    times, values = zip(*run["largest_service_difference_by_time"])
    return float(np.interp(share * times[-1], times, values))


def said(is_repeated: bool) -> str:
    """The first word of a verdict."""
    return "Repeated" if is_repeated else "NOT repeated"


def short_first(runs: Runs) -> str:
    """The verdict on latencies of short-first policies."""
    gain = ratio(runs, "fcfs", "sjf", "mean_latency_per_token_ms")
    tail = ratio(runs, "sjf", "fcfs", "p99_ttft_ms")
    displaced = ratio(runs, "srtf", "sjf", "mean_latency_per_token_ms")
    return (
        f"{said(gain > 1)}: FCFS takes {gain:.1f} times as long per output token as SJF in the mean. The "
        f"price is the tail: p99 of the TTFT is {tail:.1f} times that of FCFS, and the longest outputs "
        f"are left to "
        "run nearly alone at the end, so the run lasts longer. "
        f"{said(displaced < 1)}: that preempting for shorter requests gains more. SRTF takes {displaced:.1f} "
        "times as long per token as SJF, because a displaced request computes its tokens again: nothing is "
        "swapped, and prefixes are not cached in this run."
    )


def with_errors(runs: Runs) -> str:
    """The verdict on lengths that are predicted badly."""
    gain = ratio(runs, "fcfs", "sjf", "mean_latency_per_token_ms")
    return f"Expected lengths that err by a factor of 2.7 (one sigma) still leave a gain of {gain:.1f} times."


def fair(runs: Runs) -> str:
    """The verdict on the bound of VTC."""
    bound = 2 * max(PROMPT_LEN, 2 * FAIR_ROWS * (PROMPT_LEN + ANSWER_LEN))
    quarter, half, whole = (growth(runs["fcfs"], share) for share in (0.25, 0.5, 1.0))
    found = runs["vtc"]["largest_service_difference"]
    return (
        f"{said(found <= bound < whole)}: under VTC the largest difference is {found:,.0f}; the bound, "
        f"twice the larger of the price of a prompt and of all tokens that {FAIR_ROWS} rows hold at two "
        f"each, is "
        f"{bound:,}. Under FCFS it is {quarter:,.0f}, {half:,.0f} and {whole:,.0f} after a quarter, half and "
        "all of the run: it grows as long as both wait. Throughput is the same, as nothing is shared."
    )


def local(runs: Runs) -> str:
    """The verdict on locality against fairness."""
    deficit = f"dlpm:quantum={QUANTUM}"
    gain = ratio(runs, deficit, "vtc", "total_token_throughput")
    most = ratio(runs, "lpm:patience=inf", "vtc", "total_token_throughput")
    bound = 2 * (QUANTUM + PREFIX_LEN + OWN_LEN + 2 * ROWS * (PREFIX_LEN + OWN_LEN + OUTPUT_LEN))
    found = runs[deficit]["largest_service_difference"]
    return (
        f"{said(gain > 1 and found <= bound)}: DLPM serves {gain:.2f} times the tokens of VTC (LPM without a "
        f"guard {most:.2f} times), and its largest difference of {found:,.0f} is within the bound that "
        "follows from its rules, twice the sum of quantum, longest prompt, and tokens that run at two each: "
        f"{bound:,}. A smaller quantum is fairer and slower, a larger one the other way round. VTC charges "
        "for tokens that the cache had, which the service measured here does not count, so its difference is "
        "larger here than by its own measure. The paper's largest factor, 2.87, is not reached: it is for "
        "other "
        "models, traces and caches."
    )


def starving(runs: Runs) -> str:
    """The verdict on starvation."""
    waits = {policy: run["longest_wait"] for policy, run in runs.items()}
    free = "lpm:patience=inf"
    return (
        f"{said(waits[free] > 2 * max(waits['fcfs'], waits['preble']))}: without a guard LPM never serves "
        f"the other user, whose first request waits {waits[free]:,.0f} s to the end of the run; under "
        f"FCFS no "
        f"request waits for more than {waits['fcfs']:,.0f} s. With the guard that ships (the earliest "
        f"request is overtaken 64 times at most) it is {waits['lpm']:,.0f} s, under Preble's groups "
        f"{waits['preble']:,.0f} s, and under DLPM {waits['dlpm']:,.0f} s."
    )


def grouped(runs: Runs) -> str:
    """The verdict on groups by cached share."""
    fcfs, most, found = (runs[each]["prefix_hit_rate"] for each in ("fcfs", "lpm:patience=inf", "preble"))
    gain = ratio(runs, "fcfs", "preble", "mean_ttft_ms")
    return (
        f"{said(found > (fcfs + most) / 2)}: Preble's groups find {found:.0%} of the tokens in the cache, "
        f"FCFS {fcfs:.0%} and LPM without a guard {most:.0%}; the mean TTFT of FCFS is {gain:.1f} times "
        f"theirs."
    )


CACHED = f"--max-num-seqs {ROWS} --num-blocks 170 --enable-prefix-caching --until 60 --num-requests 700"
SHARED = (
    f"{CACHED} --workload flood:{{flood}},prefix_len={PREFIX_LEN},flood_prefix_len={PREFIX_LEN},"
    f"prompts={OWN_LEN},outputs={OUTPUT_LEN}"
)
POISSON = (
    "--max-num-seqs 32 --no-enable-prefix-caching "
    "--workload poisson:per_s=9,prompts=256~0.8,outputs=200~1 --num-requests 900"
)

CLAIMS = (
    Claim(
        "short-first",
        "Short requests first",
        "LTR (arXiv:2408.15792): serving short outputs first takes a fraction of the latency of FCFS when "
        "more requests come than are served; the paper reports 2.8 times less for a chatbot. Lengths are "
        "known.",
        f"{SERVED} {POISSON}",
        ("fcfs", "sjf", "srtf"),
        ("latency", "latency99", "ttft", "ttft99", "tpot99", "wait", "duration"),
        short_first,
    ),
    Claim(
        "short-first-guessed",
        "Short requests first, by bad guesses",
        "The same with expected lengths whose logarithm errs with a standard deviation of 1.",
        f"{SERVED} {POISSON} --length-error 1",
        ("fcfs", "sjf"),
        ("latency", "latency99", "ttft", "ttft99", "wait"),
        with_errors,
    ),
    Claim(
        "fair",
        "Fair service",
        "VTC (arXiv:2401.00588): between two users who both always have requests waiting, service differs by "
        "a constant at most; under FCFS the difference grows without end. Two users here, one of whom sends "
        "twice as much, both more than their share.",
        f"{SERVED} --max-num-seqs {FAIR_ROWS} --no-enable-prefix-caching "
        "--workload flood:num_users=1,per_s=6,flood_per_s=12,"
        f"prompts={PROMPT_LEN},outputs={ANSWER_LEN} --num-requests 2400 --until 130",
        ("fcfs", "vtc", "dlpm"),
        ("tokens", "ttft", "ttft99", "difference"),
        fair,
    ),
    Claim(
        "local",
        "Fair service of users who share prefixes",
        "DLPM (arXiv:2501.14312): admitting by cached prefixes among users with credit keeps most of LPM's "
        "throughput, well above VTC's, at bounded unfairness. Eight users with a prefix of 3,000 tokens "
        "each, of which the cache holds some.",
        f"{SERVED} {SHARED.format(flood='num_users=7,per_s=1.5,flood_per_s=1.5')}",
        ("fcfs", "vtc", "lpm:patience=inf", *(f"dlpm:quantum={each}" for each in (1024, QUANTUM, 16384))),
        ("tokens", "hits", "ttft", "ttft99", "difference"),
        local,
    ),
    Claim(
        "grouped",
        "Groups by the cached share of a prompt",
        "Preble (arXiv:2407.00023): serving groups of a higher cached share first, and those of a low one in "
        "proportion, keeps most prefix hits; that nobody starves is in the next section. Questions about 60 "
        "documents, of which the cache stores some.",
        f"{SERVED} {CACHED} --workload documents:per_s=8,num_documents=60,documents=3000~0.3,"
        "questions=60~0.3,outputs=64~0.4,skew=1.1",
        ("fcfs", "lpm:patience=inf", "preble"),
        ("tokens", "hits", "ttft", "ttft99", "wait"),
        grouped,
    ),
    Claim(
        "starving",
        "Starvation under the longest prefix first",
        "LPM (arXiv:2312.07104) serves what is cached first, and so lets others wait while requests with "
        "cached prefixes keep coming. One user floods, and another one asks now and then.",
        f"{SERVED} {SHARED.format(flood='num_users=1,per_s=0.2,flood_per_s=8')}",
        ("fcfs", "lpm:patience=inf", "lpm", "preble", "dlpm"),
        ("tokens", "hits", "ttft", "ttft99", "wait", "difference"),
        starving,
    ),
)


def example() -> list[str]:
    """The section of the page for the example of LTR's introduction: one row, steps of a second."""
    limits = StepLimits(
        max_num_seqs=1,
        max_num_batched_tokens=8,
        max_model_len=32,
        block_size=4,
        num_blocks=16,
        max_chunk_rows=1,
        decode_len=1,
    )
    server = SimulatedServer(limits, lambda bucket: 1.0, StepCost(block_size=4))
    sessions = [Session(Arrival(0.0, 1, num_outputs)) for num_outputs in (10, 2, 1)]
    means = {
        policy: RunReport.of(policy, server.run(policy, sessions)).metrics["latency_per_token"].mean / 1000
        for policy in ("fcfs", "sjf")
    }
    return [
        "## The example of LTR",
        "",
        "LTR (arXiv:2408.15792): three requests of 10, 2 and 1 tokens that come together and are served one "
        "after the other take 6.67 s per token in the mean in this order, and 1.27 s shortest first.",
        "",
        f"Repeated: {means['fcfs']:.2f} s and {means['sjf']:.2f} s.",
        "",
    ]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[each.name for each in CLAIMS])
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    began, lines = time.perf_counter(), example()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(LLAMA))
        for claim in CLAIMS:
            if claim.name in asked.only:
                picture = asked.out.with_name(f"{asked.out.stem}-{claim.name}.svg")
                section = claim.page(claim.run(Path(directory), picture), picture)
                lines += section
                print("\n".join(section), file=sys.stderr)
    seconds = time.perf_counter() - began
    head = [
        "# Claims of papers on scheduling, simulated",
        "",
        f"`python -m benchmarks.simulate_claims --out {asked.out}`, {date.today()}, {seconds:,.0f} s on "
        f"one thread of {platform.processor() or platform.machine()}. DIR has the config.json of "
        f"Llama-3.1-8B. "
        "Steps take what the cost model predicts for one Gaudi 2 (`docs/cost-model.md`); no Gaudi was "
        "measured. "
        "`docs/simulate.md` explains the columns, and `simulate-engine.md` compares predictions with an "
        "engine.",
        "",
    ]
    asked.out.write_text("\n".join([*head, *lines]), encoding="utf-8")


if __name__ == "__main__":
    main()

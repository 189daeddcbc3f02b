"""Scheduling policies: what choosing among 10,000 waiting requests costs, and how well rankers rank.

    OMP_NUM_THREADS=1 python -m benchmarks.scheduling_policies --out benchmarks/results/scheduling-policies.md

No device and no model runs: the scheduler plans and commits steps whose tokens are all the same. A row gives
the CPU time of planning and committing a step under a policy, over that under ``fcfs``, which is measured in
turn with each. Prompts share beginnings in groups, of which the prefix cache has those that came before.

Rankers learn from a synthetic trace and are measured on another one: a token of a prompt asks for a long
output, another one for a short one, and lengths follow with log-normal noise.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch

from graphs import StepLimits
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.ranking import EncoderRanker, LinearRanker, Ranker
from hpu_duo.ranking.examples import Examples
from hpu_duo.ranking.kendall import kendall_tau
from hpu_duo.ranking.train import TrainingPlan, train
from hpu_duo.request import Request, TokenLimits
from hpu_duo.sampling import SamplingParams
from hpu_duo.scheduling import POLICIES, make_policy

NUM_WAITING, NUM_STEPS, NUM_GROUPS, NUM_USERS = 10_000, 200, 50, 100
NUM_LEARNED = 2_000
LIMITS = StepLimits(
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    max_model_len=4096,
    block_size=128,
    num_blocks=1024,
    decode_len=1,
    max_chunk_rows=8,
    caches_prefixes=True,
    uses_rows=False,
)
OPT = {
    "model_type": "opt",
    "vocab_size": 512,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def seconds_per_step(name: str, seed: int) -> float:
    """CPU time of planning and committing a step."""
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(LIMITS, policy=make_policy(name))
    heads = [rng.integers(1, 512, 384) for _ in range(NUM_GROUPS)]
    limits = TokenLimits(LIMITS.max_model_len)
    for number in range(NUM_WAITING):
        prompt = np.concatenate(
            [heads[number % NUM_GROUPS], rng.integers(1, 512, int(rng.integers(16, 128)))]
        )
        params = SamplingParams(
            max_tokens=int(rng.integers(4, 64)), ignore_eos=True, user=f"user{rng.integers(NUM_USERS)}"
        )
        request = Request(str(number), prompt, params, limits)
        request.score = float(rng.random())
        scheduler.add(request)
    start = time.process_time()
    for _ in range(NUM_STEPS):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, [5] * plan.num_samples)
    return (time.process_time() - start) / NUM_STEPS


def costs(rounds: int) -> list[str]:
    """Rows of the table of costs."""
    rows = []
    for name in POLICIES:
        times = [(seconds_per_step("fcfs", seed), seconds_per_step(name, seed)) for seed in range(rounds)]
        ratios = [mine / base for base, mine in times]
        print(name, ratios, file=sys.stderr)
        rows.append(
            f"| `{name}` | {statistics.median(ratios):.2f} | {min(ratios):.2f}-{max(ratios):.2f} | "
            f"{statistics.median(mine for _, mine in times) * 1e3:.2f} |"
        )
    return rows


def synthetic(num: int, seed: int, noise: float) -> Examples:
    """Draw prompts that tell something of their outputs."""
    rng = np.random.default_rng(seed)
    prompts, lengths = [], []
    for _ in range(num):
        prompt = rng.integers(10, 512, int(rng.integers(16, 96))).astype(np.int32)
        wish = int(rng.integers(3))
        if wish:
            prompt[rng.integers(len(prompt))] = 6 + wish
        prompts.append(prompt)
        lengths.append(max(1, round((80, 400, 15)[wish] * float(np.exp(rng.normal(0, noise))))))
    return Examples(tuple(prompts), np.array(lengths))


def rankings(noise: float) -> list[str]:
    """Rows of the table of rankers."""
    rows = []
    rankers: dict[str, tuple[Ranker, TrainingPlan]] = {
        "linear": (LinearRanker(), TrainingPlan(epochs=8, learning_rate=0.05)),
        "OPT, 2 layers of 64": (EncoderRanker(OPT), TrainingPlan(epochs=6, learning_rate=2e-3)),
    }
    fresh = synthetic(1000, 1, noise)
    for name, (ranker, plan) in rankers.items():
        report = train(ranker, synthetic(NUM_LEARNED, 0, noise), plan)
        batches = [fresh.prompts[start : start + 50] for start in range(0, 1000, 50)]
        tau = kendall_tau([score for batch in batches for score in ranker.score(batch)], fresh.lengths)
        times = []
        for prompt in fresh.prompts[:200]:
            start = time.process_time()
            ranker.score([prompt])
            times.append(time.process_time() - start)
        print(name, tau, file=sys.stderr)
        rows.append(
            f"| {name} | {noise:g} | {report.held_out_tau:.3f} | {tau:.3f} | "
            f"{statistics.median(times) * 1e3:.2f} |"
        )
    return rows


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    lines = [
        "# Scheduling policies on the host",
        "",
        f"`python -m benchmarks.scheduling_policies {' '.join(sys.argv[1:])}`, {date.today()}: "
        f"{arguments.rounds} rounds, {torch.get_num_threads()} thread(s), {platform.machine()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}.",
        "",
        f"CPU time of planning and committing a step, {NUM_WAITING:,} requests waiting in the beginning and "
        f"{LIMITS.max_num_seqs} rows, {NUM_STEPS} steps, over that under `fcfs`; median and range. What the "
        "device takes is not in it.",
        "",
        "| policy | over fcfs | range | ms per step |",
        "| --- | --- | --- | --- |",
        *costs(arguments.rounds),
        "",
        "Policies that admit short requests first admit more of them in a step, and so do more in it.",
        "",
        f"Rankers on synthetic traces: {NUM_LEARNED:,} requests learned from but for a tenth, which is held "
        "out, and a fresh trace of 1,000. A third of the prompts ask for long outputs and a third for short "
        "ones; noise is the sigma of the lengths around their middles. Requests of one kind cannot be told "
        "apart, so that no tau is 1. These traces are made up: no tau of real traffic follows from them.",
        "",
        "| ranker | noise | tau, held out | tau, fresh | ms per prompt |",
        "| --- | --- | --- | --- | --- |",
        *(row for noise in (0.1, 0.5) for row in rankings(noise)),
        "",
    ]
    arguments.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()

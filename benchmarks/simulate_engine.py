"""Predictions of the simulator beside the real engine, policy by policy.

    OMP_NUM_THREADS=1 python -m benchmarks.simulate_engine --out benchmarks/results/simulate-engine.md

Times of steps of the built-in model are measured here first (``hpu_duo.lab.simulate.measuring``). Then each
policy serves the same requests twice: simulated with these times, and by the engine. Time is processor time
of one thread in both, and jumps where nobody is served, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR
from hpu_duo.engine.engine import Engine
from hpu_duo.lab.simulate.measuring import measure_steps
from hpu_duo.lab.simulate.run_log import NOBODY, RequestRecord
from hpu_duo.lab.simulate.server import SimulatedServer
from hpu_duo.lab.simulate.sessions import SessionArrivals
from hpu_duo.lab.simulate.step_times import StepTimes
from hpu_duo.lab.traces import Session
from hpu_duo.lab.traces.lengths import Lengths
from hpu_duo.lab.traces.workloads import Poisson

POLICIES = ("fcfs", "sjf", "srtf", "vtc")
LIMITS: dict[str, Any] = {
    "max_num_seqs": 6,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "block_size": 32,
    "num_blocks": 192,
    "enable_prefix_caching": False,
}
MEANS = ("ttft", "tpot", "e2el", "latency_per_token")
NAMES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "e2el": "end to end",
    "latency_per_token": "end to end per output token",
}

Means = dict[str, float]


def load(policy: str) -> HPUDuoModel:
    """The built-in model under a policy."""
    model = HPUDuoModel.from_pretrained(MODEL_DIR, scheduling_policy=policy, graphs="eager", **LIMITS)
    model.warmup()
    return model


def requests(per_s: float, num: int) -> list[Session]:
    """Requests of two users with short prompts and outputs of many lengths."""
    workload = Poisson(per_s=per_s, prompts=Lengths(96, 0.7), outputs=Lengths(24, 1.0), num_users=2)
    return [each for each in workload.sessions(num) if each.first.num_tokens <= LIMITS["max_model_len"]]


def served(engine: Engine, sessions: Sequence[Session]) -> list[RequestRecord]:
    """Serve sessions by the engine, on a clock of processor time."""
    arrivals = SessionArrivals(sessions, engine.limits.max_model_len)
    vocab_size, now = engine.limits.vocab_size or 2, 0.0
    records: dict[str, RequestRecord] = {}
    while engine.has_unfinished or arrivals.next_time() is not None:
        if not engine.has_unfinished:
            now = max(now, arrivals.next_time() or 0.0)
        for request in arrivals.due(now):
            prompt = (request.prompt_token_ids % vocab_size).tolist()
            engine.add_request(prompt, request.params, request.request_id)
            arrived, user = arrivals.came[request.request_id]
            records[request.request_id] = RequestRecord(user or NOBODY, arrived, len(prompt))
        began = time.process_time()
        outputs = engine.step()
        now += time.process_time() - began
        for output in outputs:
            record = records[output.request_id]
            record.num_output_tokens += len(output.token_ids)
            record.first_token = now if record.first_token is None else record.first_token
            record.ended = now if output.is_finished else None
    return list(records.values())


def means_of(records: Sequence[RequestRecord]) -> Means:
    """The means of the metrics, in milliseconds."""
    found = {}
    for name in MEANS:
        values = [value for each in records if (value := getattr(each, name)) is not None]
        found[name] = 1000 * sum(values) / len(values)
    return found


def agreeing_pairs(predicted: Sequence[float], measured: Sequence[float]) -> tuple[int, int]:
    """Pairs of policies in the same order in both, of those whose measured values differ by 5 % or more."""
    same = num = 0
    for at in range(len(measured)):
        for there in range(at):
            if abs(measured[at] / measured[there] - 1) < 0.05:
                continue
            num += 1
            same += (measured[at] < measured[there]) == (predicted[at] < predicted[there])
    return same, num


def report(
    times: StepTimes, predicted: dict[str, Means], measured: dict[str, Means], num: int, per_s: float
) -> str:
    """The page."""
    lines = [
        "# Predictions of the simulator beside the engine",
        "",
        f"`python -m benchmarks.simulate_engine {' '.join(sys.argv[1:])}`, {date.today()}, one thread of "
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, built-in model in float32.",
        "",
        f"{num} requests of two users at {per_s:.1f} a second, a quarter more than FCFS serves by the "
        "prediction; prompts of 96 tokens in the median and outputs of 24, log-normal; at most "
        f"{LIMITS['max_num_seqs']} at once, {LIMITS['max_num_batched_tokens']} tokens a step. Step times "
        f"were "
        f"measured just before: {sum(one.num_steps for one in times.measured.values()):,} steps of "
        f"{len(times.measured)} shapes; the fit for other shapes is {times.median_error:.0%} off in the "
        f"median. "
        "Times are processor time of one thread in both.",
        "",
        "| policy | " + " | ".join(f"{NAMES[name]}, ms: predicted | measured" for name in MEANS) + " |",
        "| --- |" + " ---: | ---: |" * len(MEANS),
    ]
    for policy in predicted:
        cells = [f"{predicted[policy][name]:,.1f} | {measured[policy][name]:,.1f}" for name in MEANS]
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    lines += [
        "",
        "| metric | order predicted | order measured | pairs in the same order |",
        "| --- " * 4 + "|",
    ]
    for name in MEANS:
        guess, found = ({policy: runs[policy][name] for policy in runs} for runs in (predicted, measured))
        same, num_pairs = agreeing_pairs(list(guess.values()), list(found.values()))
        orders = (" < ".join(sorted(each, key=each.__getitem__)) for each in (guess, found))
        lines.append(f"| {NAMES[name]} | {' | '.join(orders)} | {same} of {num_pairs} |")
    shares = [predicted[policy]["e2el"] / measured[policy]["e2el"] for policy in predicted]
    lines += [
        "",
        "Pairs whose measured means lie within 5 % of each other are not counted. Predicted means of the end "
        f"to end times are {min(shares):.2f} to {max(shares):.2f} of the measured ones. More requests come "
        f"than "
        "are served, so an error in the time of a step adds up from request to request: the simulator tells "
        "policies apart whose times differ by more than that, and promises no milliseconds.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=100)
    parser.add_argument("--max-seconds", type=float, default=25.0, help="of measuring steps")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    engine = load("fcfs").engine
    times = measure_steps(engine, max_seconds=asked.max_seconds, clock=time.process_time)
    server = SimulatedServer.measured(times)
    everything = server.run("fcfs", requests(float("inf"), asked.num_requests))
    per_s = 1.25 * len(everything.records) / everything.end
    sessions = requests(per_s, asked.num_requests)
    predicted, measured = {}, {}
    for policy in POLICIES:
        predicted[policy] = means_of(list(server.run(policy, sessions).records.values()))
        measured[policy] = means_of(served(load(policy).engine, sessions))
        print(policy, predicted[policy], measured[policy], file=sys.stderr)
    page = report(times, predicted, measured, len(sessions), per_s)
    if asked.out is None:
        print(page)
    else:
        asked.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

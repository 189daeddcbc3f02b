"""Requests that displace one another, swapped and computed again; see ``benchmarks.offload --storm``."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.cpu_systems import VOCAB, seconds
from benchmarks.prefix_cache import same_tokens
from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams


class Storm(NamedTuple):
    """Requests that displace one another; prompts have 300 to 700 tokens.

    Attributes:
        num_requests: number of requests.
        quantum: of ``mlfq``, the default policy.
        gap: steps between two arrivals in the mean.
        answers: fewest and most tokens of an answer.
    """

    num_requests: int
    quantum: int
    gap: float
    answers: tuple[int, int]


STORMS = {"long": Storm(16, 16, 2.0, (100, 200)), "short": Storm(40, 4, 8.0, (60, 119))}


class Stormed(NamedTuple):
    """Requests that were served: tokens per CPU second, what was preempted, and the answers."""

    tokens_per_s: float
    preempted: str
    answers: list[list[int]]


def storm(path: Path, kind: Storm, policy: str, dtype: str, *, swaps: bool) -> Stormed:
    """Serve requests in 1,024 tokens of blocks.

    A request of an upper level of ``mlfq`` displaces one of a lower level, which comes back later.
    """
    swap = {"kv_offloading_size": 0.02, "preemption_mode": "swap", "swap_space": 1.0}
    # Of ten blocks, two are reserved.
    model = HPUDuoModel.from_pretrained(
        path,
        num_blocks=10 if swaps else 8,
        max_num_seqs=8,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        graphs="replay",
        scheduling_policy=policy,
        dtype=dtype,
        **(swap if swaps else {}),
    )
    model.warmup()
    engine, random, at = model.engine, np.random.default_rng(7), 0.0
    coming: list[tuple[float, list[int], int]] = []
    for _ in range(kind.num_requests):
        length, num_new = int(random.integers(300, 701)), int(random.integers(*kind.answers, endpoint=True))
        at += random.exponential(kind.gap)
        coming.append((at, random.integers(0, VOCAB, length).tolist(), num_new))
    answers: dict[str, list[int]] = {}

    def serve() -> None:
        step = 0
        while coming or engine.has_unfinished:
            while coming and (coming[0][0] <= step or not engine.has_unfinished):
                _, text, num_new = coming.pop(0)
                params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
                answers[engine.add_request(text, params)] = []
            for each in engine.step():
                answers[each.request_id] += each.token_ids
            step += 1

    taken, stats = seconds(serve), model.stats()
    total, offload = sum(map(len, answers.values())), stats.offload
    preempted = (
        f"{stats.num_preemptions} preemptions, {stats.num_prompt_tokens:,} prompt tokens computed, "
        f"{offload and offload.swap}"
    )
    return Stormed(total / taken, preempted, list(answers.values()))


def storms(path: Path, kind: Storm, policy: str, dtype: str) -> None:
    """Serve a storm with swapping and without, and print both.

    Raises:
        ValueError: see ``same_tokens``.
    """
    swapped = storm(path, kind, policy, dtype, swaps=True)
    print(f"swap {swapped.tokens_per_s:.2f} tokens a second ({swapped.preempted})", flush=True)
    computed = storm(path, kind, policy, dtype, swaps=False)
    print(f"recompute {computed.tokens_per_s:.2f} tokens a second ({computed.preempted})")
    same = same_tokens(swapped.answers, computed.answers, dtype)
    ratio = swapped.tokens_per_s / computed.tokens_per_s
    print(f"swap : recompute {ratio:.2f}, the same tokens in {same} of {len(swapped.answers)} answers")

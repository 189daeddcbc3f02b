"""Random requests of mixed lengths, some of which begin alike, fork, or are aborted."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from graphs import BucketTable
from hpu_duo import HPUDuoModel
from hpu_duo.request import FinishReason
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import assert_holds_nothing
from tests.modeling.families import BLOCK, prompts_of

LIMITS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "num_blocks": 13,
    "max_model_len": 48,
}
COARSE = BucketTable.from_strings(["csu/q48/s13/u13/l8", "--u/q8/s0/u13/l8"])
"""A bucket for all steps and one for decodes: two graphs to capture, of six of the default table."""
BEGINS = (8, 16, 21)
Done = dict[tuple[int, int], tuple[list[int], FinishReason]]


@dataclass(frozen=True)
class Workload:
    """Prompts, how to sample from each, and a seed for arrivals and aborts."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    seed: int

    @classmethod
    def random(cls, num_requests: int, seed: int) -> Workload:
        """Every other prompt begins like others do, with one of three beginnings of one to three blocks."""
        rng = random.Random(seed)
        lengths = [rng.choice((1, 2, 7, 8, 9, 16, rng.randint(1, 40))) for _ in range(num_requests)]
        prompts = prompts_of(lengths, seed=seed)
        begins = prompts_of(BEGINS, seed=seed + 1)
        for number in range(0, num_requests, 2):
            prompts[number] = (rng.choice(begins) + prompts[number])[:40]
        return cls(prompts, [_params(rng) for _ in lengths], seed)

    def num_alike(self) -> int:
        """Prompts that agree with another one in its first block, and differ from it later."""
        different = {tuple(prompt) for prompt in self.prompts if len(prompt) > BLOCK}
        begins = Counter(prompt[:BLOCK] for prompt in different)
        return sum(count for count in begins.values() if count > 1)

    def run(self, served: HPUDuoModel) -> Done:
        """Submit a few at a time and abort some; arrivals depend on nothing but the seed."""
        rng, engine = random.Random(self.seed), served.engine
        pending = list(enumerate(zip(self.prompts, self.params)))[::-1]
        tokens: dict[tuple[int, int], list[int]] = {}
        done: Done = {}
        while pending or engine.has_unfinished:
            for _ in range(rng.randrange(5)):
                if pending:
                    number, (prompt, params) = pending.pop()
                    engine.add_request(prompt, params, request_id=str(number))
            if rng.random() < 0.1:
                engine.abort(str(rng.randrange(len(self.prompts))))
            for output in engine.step():
                key = (int(output.request_id), output.sample_index)
                tokens.setdefault(key, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    done[key] = (tokens[key], output.finish_reason)
        assert_holds_nothing(served)
        return done


def _params(rng: random.Random) -> SamplingParams:
    common: dict[str, Any] = {"max_tokens": rng.randint(1, 8), "seed": rng.randrange(1000)}
    match rng.randrange(8):
        case 0:
            return SamplingParams(temperature=1.5, top_k=20, min_p=0.01, **common)
        case 1:
            return SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.3, n=3, **common)
        case 2:
            return SamplingParams(
                temperature=1.1, frequency_penalty=0.7, logit_bias={7: 3.0}, n=2, min_tokens=1, **common
            )
        case 3:
            return SamplingParams(temperature=0, logprobs=rng.choice((0, 5, 8)), **common)
        case _:
            return SamplingParams(temperature=0, **common)

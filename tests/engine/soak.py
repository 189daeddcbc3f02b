"""Serve random requests for a while and print how much memory that has come to take, in MB.

    python tests/engine/soak.py FOLDER GRAPHS REQUESTS WARM_REQUESTS

A process of its own, so that nothing else is measured. Prints the growth of resident memory from the time
when ``WARM_REQUESTS`` had been taken in to the end.
"""

from __future__ import annotations

import mmap
import random
import sys
from pathlib import Path

import torch

from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams

VOCAB = 512


def resident_mb() -> float:
    """Resident memory of the process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 2**20


def main(folder: str, graphs: str, num_requests: int, num_warm: int) -> None:
    """Serve and print."""
    torch.set_num_threads(1)
    model = HPUDuoModel.from_pretrained(
        folder, device="cpu", max_num_seqs=16, max_model_len=600, max_num_batched_tokens=1024, graphs=graphs
    )
    rng, engine = random.Random(0), model.engine
    num_added, begin = 0, 0.0
    while num_added < num_requests or engine.has_unfinished:
        while num_added < num_requests and rng.random() < 0.5:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 500))]
            params = SamplingParams(
                temperature=rng.choice((0.0, 1.0)), max_tokens=rng.randint(1, 60), ignore_eos=True
            )
            engine.add_request(prompt, params)
            num_added += 1
            if num_added == num_warm:
                begin = resident_mb()
        engine.step()
    print(round(resident_mb() - begin))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

"""This engine with compiled steps and the default table."""

from __future__ import annotations

from importlib.metadata import version

import protocol
import torch

from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams


def start(limits: protocol.Limits) -> tuple[str, protocol.Serve]:
    """Load, and compile every bucket when there are several rows; one row compiles as it goes."""
    torch.set_num_threads(1)
    model = HPUDuoModel.from_pretrained(
        limits.model,
        device="cpu",
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_tokens,
        graphs="compile",
    )
    if limits.max_num_seqs > 1:
        model.warmup()

    def serve(prompts: list[list[int]], new: list[int], watch: protocol.Stopwatch) -> None:
        for prompt, length in zip(prompts, new):
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            model.engine.add_request(prompt, params)
        while model.engine.has_unfinished:
            if any(output.token_ids for output in model.engine.step()):
                watch.token()

    return f"hpu-duo {version('hpu-duo')}", serve


if __name__ == "__main__":
    protocol.main(start)

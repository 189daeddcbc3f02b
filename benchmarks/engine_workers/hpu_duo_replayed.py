"""This engine with replayed steps and the default table."""

from __future__ import annotations

import json
from importlib.metadata import version

import protocol
import torch

from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.sampling import SamplingParams


class Replayed(protocol.SteppedEngine):
    """This engine, warmed up until every bucket is replayed."""

    def __init__(self, limits: protocol.Limits) -> None:
        torch.set_num_threads(1)
        self.name = f"hpu-duo {version('hpu-duo')}"
        pattern = None
        if limits.streaming:
            self.name += f", {limits.streaming:.0%} of the heads streaming"
            config = json.loads((limits.model / "config.json").read_text())
            layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
            pattern = HeadPattern.random(layers, heads, 0, sink=64, recent=256)
        self._model = HPUDuoModel.from_pretrained(
            limits.model,
            enable_prefix_caching=limits.prefix_caching,
            device="cpu",
            dtype=limits.dtype,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_tokens,
            graphs="replay",
            pattern=pattern,
            sparsity=limits.streaming if pattern else None,
        )
        self.name += f" ({self._model.stats().resolved.computation})"
        self._model.warmup()
        self._keys: dict[str, int] = {}

    def add(self, key: int, prompt: list[int], new: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        self._keys[self._model.engine.add_request(prompt, params)] = key

    def step(self) -> list[int]:
        return [self._keys[out.request_id] for out in self._model.engine.step() if out.token_ids]

    def is_busy(self) -> bool:
        return self._model.engine.has_unfinished


if __name__ == "__main__":
    protocol.main(Replayed)

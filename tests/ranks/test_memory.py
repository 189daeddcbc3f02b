"""No rank ever holds the whole weights."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpu_duo.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from hpu_duo.device import Member, run_processes
from hpu_duo.device.ranks import Ranks
from hpu_duo.modeling.loading import read_config
from hpu_duo.modeling.precision import Precision
from hpu_duo.startup.sharding import load_rank
from tests.modeling.families import make_config

pytestmark = pytest.mark.usefixtures("forked_ranks")

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


EXPERTS = {**SIZES, "intermediate_size": 256, "num_local_experts": 8}
FAMILIES = {
    "llama": ("LlamaConfig", SIZES, {}),
    "rows by kind": ("Phi3Config", {**SIZES, "pad_token_id": 0}, {}),
    "rows by group": ("GPTNeoXConfig", SIZES, {}),
    "widths of experts": ("MixtralConfig", EXPERTS, {}),
    "whole experts": ("MixtralConfig", EXPERTS, {"expert_parallel": True}),
}
"""Configurations, with settings of ranks: dense layers, fused projections, and experts."""


def anonymous_bytes() -> int:
    """Resident memory that is no mapping of a file."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError("the system tells no RssAnon")


def peak_of_loading(member: Member, path: Path, parallel: dict[str, Any]) -> tuple[int, int]:
    """The most that loading adds at any moment, and the bytes of the share."""
    config = EngineConfig(
        model=ModelConfig(path=path, device="cpu", dtype="float32"),
        cache=CacheConfig(block_size=16),
        parallel=ParallelConfig(tensor_parallel_size=member.size, **parallel),
    )
    ranks, hf_config, peak = Ranks(member.rank, member.size), read_config(path), [0]
    before, is_done = anonymous_bytes(), threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            peak[0] = max(peak[0], anonymous_bytes() - before)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    share = load_rank(config, hf_config, Precision.of(torch.float32), torch.device("cpu"), ranks, "")
    is_done.set()
    watcher.join()
    return peak[0], sum(parameter.nbytes for parameter in share.model.parameters())


CASES = [
    ("widths of experts", 2),
    *(
        pytest.param(name, 2, marks=pytest.mark.exhaustive)
        for name in ("llama", "rows by kind", "rows by group", "whole experts")
    ),
    *(
        pytest.param(name, 4, marks=pytest.mark.exhaustive)
        for name in FAMILIES
        if name != "widths of experts"
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), CASES)
def test_loading_a_share_takes_little_more_than_the_share(name: str, size: int, tmp_path: Path) -> None:
    family, sizes, parallel = FAMILIES[name]
    model = AutoModelForCausalLM.from_config(make_config(family, **sizes))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size="40MB")
    del model
    # The trial at load widens two layers and keeps their intermediates. Slices of experts are read some time
    # before they are merged: 0.23 to 0.40 more, differently in each run; twice the share would be 0.5 more.
    most = 0.45 if name == "widths of experts" else 0.25
    for peak, share in run_processes(peak_of_loading, (tmp_path, parallel), [{}] * size, 300):
        assert share < 1.02 * whole / size
        assert peak < share + most * whole

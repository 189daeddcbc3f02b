"""One rule for the share of a device's memory: of the engine, the audit and the cost model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from hpu_duo import HPUDuoModel
from hpu_duo.config.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from hpu_duo.config.limits import DEVICE_MEMORY_UTILIZATION, DeviceBudget
from hpu_duo.lab.audit import build_structure
from hpu_duo.planning import GAUDI2, Deployment, Format, Serving
from hpu_duo.planning.read_model import read_model
from kernels_ref import PLAIN
from tests.tiers import every

ROWS, MAX_LEN, BLOCK = 16, 4096, 16
SHARES = (0.5, DEVICE_MEMORY_UTILIZATION, 1.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llama")
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=96,
        max_position_embeddings=MAX_LEN,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("share", every(len(SHARES), SHARES))
def test_engine_audit_and_capacity_hold_the_same_blocks(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    hardware = replace(GAUDI2, memory_bytes=3_000_000)
    size = read_model(model_dir)
    serving = Serving(
        hardware,
        block_size=BLOCK,
        max_num_seqs=ROWS,
        device_memory_utilization=share,
    )
    counted = Deployment(size, serving, 0.0, PLAIN, MAX_LEN).count_blocks(ROWS)
    assert ROWS < counted < ROWS * MAX_LEN // BLOCK, "memory is what limits the blocks"

    config = EngineConfig(
        model=ModelConfig(path=model_dir, dtype="bfloat16"),
        cache=CacheConfig(block_size=BLOCK, device_memory_utilization=share),
        scheduler=SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=64),
    )
    audited = build_structure(config, hardware)
    assert audited.memory.num_blocks == counted

    weight_bytes = audited.weight_bytes
    assert weight_bytes == size.weight_bytes(Format.BF16)
    answers = {
        "total_bytes": hardware.memory_bytes,
        "used_bytes": weight_bytes,
        "free_bytes": hardware.memory_bytes - weight_bytes,
    }
    for name, value in answers.items():
        monkeypatch.setattr(f"hpu_duo.device.CpuRuntime.{name}", lambda self, value=value: value)
    for_graphs = int(0.1 * (int(share * hardware.memory_bytes) - weight_bytes))
    loaded = HPUDuoModel.from_pretrained(
        model_dir,
        device="cpu",
        dtype="bfloat16",
        block_size=BLOCK,
        max_num_seqs=ROWS,
        max_num_batched_tokens=64,
        graph_memory_bytes=for_graphs,
        device_memory_utilization=share,
    )
    assert loaded.engine.runner.store.plan.num_blocks == counted


@given(
    total=st.integers(1, 10**12),
    held=st.integers(0, 10**12),
    others=st.integers(0, 10**12),
    share=st.floats(0.01, 1.0),
)
def test_no_more_is_taken_than_the_share_of_all_and_of_what_is_free(
    total: int, held: int, others: int, share: float
) -> None:
    free = max(0, total - held - others)
    budget = DeviceBudget(total, held, free, share)
    left = budget.left_bytes
    assert 0 <= left <= share * free
    assert left == 0 or held + left <= share * total
    assert budget.kv_bytes(budget.graph_bytes()) + budget.graph_bytes() == left
    alone = DeviceBudget.of_own_device(total, min(held, total), share)
    assert alone.left_bytes == max(0, int(share * total) - min(held, total)), "others do not count then"


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan"), True, "0.9"])
def test_what_is_no_share_is_refused(share: object) -> None:
    with pytest.raises(ValueError, match=r"expected device_memory_utilization in \(0, 1\], got"):
        CacheConfig(device_memory_utilization=share)  # type: ignore[arg-type]


def test_a_share_that_holds_nothing_says_what_it_is_a_share_of(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpu_duo.device.CpuRuntime.total_bytes", lambda self: 10**6)
    told = "that is what device_memory_utilization=0.3 of 1000000 bytes leaves beside .* in use"
    with pytest.raises(ValueError, match=told):
        HPUDuoModel.from_pretrained(model_dir, device="cpu", device_memory_utilization=0.3)

"""Defaults that depend on the device: capture backend, dtype and table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphs.backends import chosen_name
from graphs.planner import evaluate
from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR
from hpu_duo.modeling import precision
from hpu_duo.modeling.loading import resolve_dtype
from hpu_duo.modeling.precision import Precision
from hpu_duo.planning.simulation import prior
from hpu_duo.startup.tables import default_table

LIMITS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
    "block_size": 16,
}


@pytest.mark.parametrize(
    ("name", "device", "is_lazy", "backend"),
    [
        ("default", "hpu", False, "hpu-compile"),
        ("default", "hpu", True, "hpu-graph"),
        ("default", "cpu", False, "eager"),
        ("default", "cuda", False, "eager"),
        ("auto", "cpu", False, "replay"),
        ("auto", "cuda", False, "cuda"),
        ("eager", "hpu", False, "eager"),
    ],
)
def test_an_hpu_captures_unless_told_otherwise(name: str, device: str, is_lazy: bool, backend: str) -> None:
    assert chosen_name(name, device, is_lazy) == backend


@pytest.mark.parametrize("own", ["float32", "float16", "bfloat16"])
def test_an_hpu_computes_in_bfloat16_unless_told_otherwise(own: str) -> None:
    config = SimpleNamespace(dtype=own)
    assert resolve_dtype("auto", config, "hpu") == torch.bfloat16
    assert resolve_dtype("auto", config) == getattr(torch, own)
    assert resolve_dtype(own, config, "hpu") == getattr(torch, own)
    told = Precision.of(torch.bfloat16).notes("auto", config)
    assert bool(told) is (own != "bfloat16")
    assert all(own in note for note in told)


@pytest.mark.parametrize("own", ["float32", "float16", "bfloat16"])
def test_a_cpu_computes_in_float32_what_is_not_multiplied(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(dtype=own)
    monkeypatch.setattr(precision, "can_pack", lambda dtype: False)
    monkeypatch.setattr(precision, "is_native", lambda dtype: False)
    monkeypatch.setattr(precision.library, "serves", lambda store, arithmetic: arithmetic == torch.float32)
    monkeypatch.setattr(precision.library, "origin", lambda: "built")
    dtype = getattr(torch, own)
    assert Precision.choose("auto", config, "cpu") == Precision(dtype, dtype, torch.float32)
    monkeypatch.setattr(precision.library, "origin", lambda: None)
    chosen = Precision.choose("auto", config, "cpu")
    assert chosen == Precision.of(torch.float32)
    notes = chosen.notes("auto", config)
    assert bool(notes) is (own != "float32")
    assert all(f"dtype={own!r} keeps it" in note for note in notes)
    assert Precision.choose(own, config, "cpu") == Precision.of(getattr(torch, own))


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_a_dtype_has_a_short_name(short: str, name: str) -> None:
    assert resolve_dtype(short, SimpleNamespace(dtype=None)) == getattr(torch, name)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_table_of_an_accelerator_is_planned_and_pads_less() -> None:
    served = HPUDuoModel.from_pretrained(MODEL_DIR, device="hpu-sim", num_blocks=64, **LIMITS)
    limits, runner = served.engine.scheduler.limits, served.engine.runner
    config = runner.model.model.config.get_text_config()
    planned, default = runner.graphs.table, default_table(limits, runner.model.specs, config)
    traffic = prior(limits, seed=3)
    reports = [evaluate(table.buckets, limits, planned.cost, traffic) for table in (planned, default)]
    assert len(planned) <= len(default)
    assert all(report.holds_all for report in reports)
    assert reports[0].mean < reports[1].mean

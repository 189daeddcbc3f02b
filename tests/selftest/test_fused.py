"""The trials of fused operators as a self-test notes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpu_duo.lab.selftest.finding import Finding, Notes, read_notes
from hpu_duo.lab.selftest.stages import try_fused
from hpu_duo.lab.selftest.subject import Subject
from kernels_ref.hpu.attention import ATTENTION, BLOCK_SOFTMAX, SOFTMAX

pytestmark = pytest.mark.usefixtures("simulated_hpu")


def tried(path: Path) -> tuple[bool, list[Finding]]:
    notes = Notes(path)
    notes.begin_stage("kernels")
    return try_fused(Subject("hpu-sim"), notes), read_notes(path)[0].findings


def test_what_passes_is_a_fact_for_each_kind_of_head(tmp_path: Path) -> None:
    always, findings = tried(tmp_path / "notes")
    assert always
    assert len(findings) == 16
    for finding in findings:
        assert finding.is_ok is None
        assert finding.detail == f"passed: {ATTENTION}, {SOFTMAX}, {BLOCK_SOFTMAX}"
        assert finding.values["row_attention"]
        is_scaled = "bfloat16, fast" in finding.name
        assert finding.values["inverse_scale"] == (128.0 if is_scaled else 1.0)


def test_an_operator_that_fails_is_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("synStatus 26")

    monkeypatch.setattr(torch.ops.hpu, SOFTMAX, fails)
    always, findings = tried(tmp_path / "notes")
    assert always
    assert all(each.detail.endswith(f"; {SOFTMAX}: synStatus 26") for each in findings)
    for name in (ATTENTION, BLOCK_SOFTMAX):
        monkeypatch.setattr(torch.ops.hpu, name, fails)
    always, findings = tried(tmp_path / "more")
    assert not always
    assert all(each.detail.startswith("passed: none; ") for each in findings)

"""``hpu-duo doctor``, ``--version`` and ``--help``."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from hpu_duo import __version__
from hpu_duo.lab.selftest.rates import numa_node, offload_facts
from kernels_ref import native
from kernels_ref.x86 import library
from tests.needs import needs_x86_kernels

Run = Callable[..., Result]


def test_the_cpu_is_usable_and_what_is_not_says_why(hpu_duo: Run) -> None:
    result = hpu_duo("doctor", "--json")
    assert result.exit_code == 0
    findings = {(one["topic"], one["name"]): one for one in json.loads(result.stdout)}
    assert findings["devices", "cpu"]["is_usable"]
    assert findings["devices", "cuda"]["is_usable"] == torch.cuda.is_available()
    assert torch.__version__.startswith(findings["versions", "torch"]["detail"])
    assert findings["graphs", "eager"]["is_usable"]
    assert ("graphs", "compile") in findings
    for one in findings.values():
        if one["is_usable"] is False:
            assert len(one["detail"]) > 10, "a reason, not a word"


def test_the_report_for_people_holds_the_same_lines(hpu_duo: Run) -> None:
    result = hpu_duo("doctor")
    assert result.exit_code == 0
    for text in ("versions", "transformers", "devices", "cuda", "packed weights", "compile"):
        assert text in result.stdout


def test_a_model_is_told_with_what_its_engine_made_of_the_options(hpu_duo: Run, model_dir: Path) -> None:
    options = ("--model", model_dir, "--max-num-seqs", 3, "--num-blocks", 8, "--block-size", 16)
    result = hpu_duo("doctor", *options, "--json")
    assert result.exit_code == 0, result.stderr
    found = {one["name"]: one["detail"] for one in json.loads(result.stdout) if one["topic"] == "model"}
    assert (found["device"], found["dtype"], found["attention"]) == ("cpu", "float32", "sdpa")
    assert (found["weight_dtype"], found["kv_cache_dtype"]) == ("float32", "float32")
    assert found["kernels"]
    assert (found["max_num_seqs"], found["num_blocks"], found["max_model_len"]) == ("3", "8", "129")
    shown = hpu_duo("doctor", *options)
    assert "max_num_batched_tokens" in shown.stdout


def test_a_model_that_cannot_be_served_is_refused_by_doctor_with_a_sentence(
    hpu_duo: Run, model_dir: Path
) -> None:
    result = hpu_duo("doctor", "--model", model_dir, "--num-blocks", 8, "--max-model-len", 4096)
    assert result.exit_code == 2
    assert "max_model_len=4096 needs 4095 cached tokens" in result.stderr


def test_without_a_compiler_only_the_compile_backend_is_lost(
    hpu_duo: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(native, "prebuilt_folder", lambda: tmp_path)
    result = hpu_duo("doctor", "--json")
    findings = {(one["topic"], one["name"]): one for one in json.loads(result.stdout)}
    assert result.exit_code == 0
    assert findings["graphs", "eager"]["is_usable"]
    assert not findings["graphs", "compile"]["is_usable"]
    assert "no C++ compiler" in findings["graphs", "compile"]["detail"]
    if library.lanes():
        detail = findings["cpu", "packed weights"]["detail"]
        assert "need a C++ compiler or a wheel" in detail
        assert library.LOSS in detail


@needs_x86_kernels
def test_weights_are_packed_for_our_kernels_on_a_cpu_with_avx2_only(
    hpu_duo: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for value in ("avx2", "0", "off"):
        monkeypatch.setenv(library.SWITCH, value)
        lines = json.loads(hpu_duo("doctor", "--json").stdout)
        found[value] = next(one["detail"] for one in lines if one["name"] == "packed weights")
    expected = "bfloat16 and float16 weights are laid out once for our kernels (AVX2, float32"
    assert found["avx2"].startswith(expected)
    assert found["0"].endswith(f"{library.SWITCH}=0 switches our kernels off, and {library.LOSS}")
    assert "expected 0, 1, avx2 or avx512, got 'off'" in found["off"]


def test_the_version_is_that_of_the_installed_package(hpu_duo: Run) -> None:
    assert hpu_duo("--version").stdout == f"hpu-duo {__version__}\n"
    assert metadata.version("hpu-duo") == __version__


def test_help_comes_without_importing_torch() -> None:
    script = """
import sys
from typer.testing import CliRunner
from hpu_duo.cli.app import app
for arguments in (["--help"], ["generate", "--help"], ["passkey", "--help"], ["doctor", "--help"]):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "Usage" in result.output, result.output
result = CliRunner().invoke(app, ["generate"])
assert result.exit_code == 2, result.output
heavy = {"torch", "transformers", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_numa_node_is_that_of_the_card_that_is_open(tmp_path: Path) -> None:
    for number, node in enumerate((0, 1, -1)):
        file = tmp_path / f"sys/class/accel/accel{number}/device/numa_node"
        file.parent.mkdir(parents=True)
        file.write_text(f"{node}\n")
    (opened := tmp_path / "proc/self/fd").mkdir(parents=True)
    (opened / "0").symlink_to("/dev/null")
    assert numa_node("hpu:0", tmp_path) is None
    (opened / "7").symlink_to("/dev/accel/accel2")
    assert numa_node("hpu:0", tmp_path) is None
    (opened / "8").symlink_to("/dev/accel/accel_controlD0")
    (opened / "9").symlink_to("/dev/accel/accel1")
    assert numa_node("hpu:0", tmp_path) == 1
    assert numa_node("cpu", tmp_path) is None


def test_rates_of_copies_are_measured_in_a_folder(tmp_path: Path) -> None:
    facts = list(offload_facts("cpu", tmp_path, sizes=(1 << 20,)))
    assert [fact.name for fact in facts][:3] == ["host memory", "1 MiB, cpu", f"1 MiB, {tmp_path}"]
    assert "GB/s to the host" in facts[1].detail
    assert "GB/s written" in facts[2].detail
    assert not list(tmp_path.iterdir())

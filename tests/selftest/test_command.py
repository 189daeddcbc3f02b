"""The command from end to end on the CPU and on the simulated HPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpu_duo.cli.app import app
from hpu_duo.planning.fit import main as fit_main
from tests.tiers import every
from tests.vendor import STANDIN

runner = CliRunner()

# Stages run in forked processes, except for the test that runs the command in a process of its own.
pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_chosen_stages_on_the_simulated_device(tmp_path: Path) -> None:
    arguments = ["selftest", "--device", "hpu-sim", "--only", "machine,generation", "--output", str(tmp_path)]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "selftest.json").read_text(encoding="utf-8"))
    assert [stage["name"] for stage in report["stages"]] == ["machine", "generation"]
    assert report["is_ok"]
    assert "The device is simulated" in (tmp_path / "selftest.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_device_that_is_not_there_is_reported(tmp_path: Path) -> None:
    arguments = ["selftest", "--device", "cuda", "--only", "machine,generation", "--output", str(tmp_path)]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 1
    report = json.loads((tmp_path / "selftest.json").read_text(encoding="utf-8"))
    failed = [finding for finding in report["stages"][0]["findings"] if finding["is_ok"] is False]
    assert [finding["name"] for finding in failed] == ["device: cuda"]
    assert "device 'cuda' is not available:" in report["stages"][1]["error"]


def test_bad_options_are_refused() -> None:
    for option, value, told in (
        ("--only", "nonsense", "expected stages among"),
        ("--hardware", "gaudi9", "expected hardware gaudi2 or gaudi3"),
    ):
        done = runner.invoke(app, ["selftest", "--device", "cpu", option, value])
        assert done.exit_code != 0
        assert told in done.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "more"),
    every(3, [("hpu-sim", ("--only", "machine,generation,timing")), ("hpu-sim", ()), ("cpu", ())]),
)
def test_selected_or_all_stages_pass(
    device: str, more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["selftest", "--device", device, "--hardware", "gaudi3", "--output", str(tmp_path), *more]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    told = (tmp_path / "selftest.md").read_text(encoding="utf-8")
    assert ("The device is simulated" in told) is (device == "hpu-sim")
    fit_main([str(tmp_path / "selftest.json")])
    assert f"was measured on {device}, which is no Gaudi" in capsys.readouterr().out


@pytest.mark.slow
def test_a_device_without_tensors_fails_stages_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in of the vendor's package has a device that can be asked about, and no tensors on it."""
    path = os.pathsep.join((str(STANDIN), str(Path(__file__).parents[2])))
    monkeypatch.setenv("PYTHONPATH", path)
    command = [sys.executable, "-m", "hpu_duo.cli", "selftest", "--device", "hpu", "--output", str(tmp_path)]
    done = subprocess.run([*command, "--only", "machine,timing"], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    fields = json.loads((tmp_path / "selftest.json").read_text())
    stages = {stage["name"]: stage for stage in fields["stages"]}
    assert list(stages) == ["machine", "timing"]
    assert stages["machine"]["error"] is None
    assert "Device 'hpu' does not have a corresponding module" in stages["timing"]["error"]
    assert fields["rows"] == []
    assert (tmp_path / "selftest.md").read_text().startswith("#")


def test_measured_rows_of_a_card_are_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {
        "num_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_heads": 32,
        "num_kv_heads": 8,
        "vocab_size": 128256,
    }
    row = {
        "device": "hpu",
        "hardware": "gaudi3",
        "model": "Llama-3.1-8B",
        "sizes": sizes,
        "input_len": 128,
        "output_len": 64,
        "batch": 8,
        "tokens_per_s": 900.0,
    }
    path = tmp_path / "selftest.json"
    path.write_text(json.dumps({"rows": [row]}), encoding="utf-8")
    fit_main([str(path)])
    output = capsys.readouterr().out
    assert "Llama-3.1-8B, 8 x (128 + 64): predicted" in output
    assert "fitted with them: Efficiency(" in output


@pytest.mark.parametrize("text", ["", "[]", '{"rows": [{"device": "hpu"}]}'])
def test_a_file_that_is_no_report_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "selftest.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit):
        fit_main([str(path)])
    assert "expected measured rows of hpu-duo selftest" in capsys.readouterr().err

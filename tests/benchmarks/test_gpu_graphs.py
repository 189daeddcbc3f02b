"""The benchmark of captured steps on toy sizes; without a GPU, recorded operators replace CUDA graphs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_graphs
from benchmarks.gpu_graphs import MODELS, Work, measure, report
from benchmarks.gpu_suite.engines import Setup
from graphs import BucketTable
from graphs.backends.cuda import CudaBackend
from tests.graphs.operator_graph import OperatorRecorder

TOY = MODELS["toy"]
SETUP = Setup(torch.device("cpu"), torch.float32, "reference", "cuda", 8)
WORK = Work(3, 9, 4, num_warm=1)
TABLE = BucketTable.from_strings(["csu/q32/s8/u9/l3", "--u/q3/s0/u9/l3"])


def test_both_engines_serve_the_same_tokens_and_every_bucket_is_captured() -> None:
    captured, table = measure(TOY, SETUP, WORK, CudaBackend(OperatorRecorder()), TABLE)
    written, _ = measure(TOY, SETUP, WORK, "eager", table)
    assert table == TABLE
    assert {each.shape for each in captured.captures} == set(TABLE)
    assert captured.step.rounds == written.step.rounds == 4
    assert all(len(tokens) == WORK.num_new for tokens in captured.tokens.values())
    text = report(TOY, WORK, {"device": "none"}, written, captured)
    for expected in (
        "3 decodes, 9 tokens",
        "| as written |",
        "| cuda |",
        "All 2 buckets",
        str(TABLE.largest),
    ):
        assert expected in text
    other = {name: tokens[:-1] for name, tokens in written.tokens.items()}
    with pytest.raises(ValueError, match="expected equal tokens from both engines, got others for request-0"):
        report(TOY, WORK, {}, replace(written, tokens=other), captured)


def test_the_script_runs_on_a_cpu_and_writes_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "reports" / "graphs.md"
    sizes = ["--decodes", "2", "--context", "5", "--steps", "2", "--block-size", "8"]
    gpu_graphs.main(["--device", "cpu", "--model", "toy", "--graphs", "eager", *sizes, "--out", str(out)])
    assert out.read_text().startswith(
        "# Captured steps against steps as written\n\ntoy, random weights: 2 decodes"
    )
    assert "Both sampled the same tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--device", "cpu", "--model", "toy"], "CUDA graphs record steps on device 'cuda', got 'cpu'"),
        (["--device", "cpu", "--model", "toy", "--steps", "0"], "expected num_steps >= 1, got 0"),
        (["--device", "tpu"], "expected device 'auto' or one of"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_sentence(arguments: list[str], problem: str) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_graphs.main(arguments)
    assert problem in str(ended.value)

"""Options of capture: what a run says of it, and how one ends that compiles too late."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from graphs import BatchShape, GraphMissError, Miss
from hpu_duo import HPUDuoModel
from hpu_duo.cli.text import run as serving

Run = Callable[..., Result]


@pytest.fixture
def arguments(model_dir: Path, simulated_hpu: object, default_buckets: None) -> list[str | Path]:
    """A short prompt on the simulated HPU, where steps of a table are captured without a compiler's time."""
    limits = ["--block-size", "8", "--max-model-len", "24", "--max-num-batched-tokens", "8"]
    return [
        "generate",
        "--model",
        model_dir,
        "--device",
        "hpu-sim",
        "--prompt",
        "sixteen letters.",
        *limits,
    ]


def test_a_run_that_was_warmed_up_compiles_nothing_and_counts_long_steps(
    hpu_duo: Run, arguments: list[str | Path]
) -> None:
    result = hpu_duo(
        *arguments,
        *("--max-new-tokens", "3", "--json", "--fail-on-recompile", "--graphs", "auto"),
        *("--max-captured-tokens", "4", "--graph-memory-bytes", "1MiB"),
    )
    assert result.exit_code == 0, result.stderr
    stats = json.loads(result.stdout)["run"]["stats"]
    assert (stats["num_late_captures"], stats["num_graph_misses"]) == (0, 0)
    assert stats["num_uncaptured_steps"] == 2, "two chunks of 8 tokens"
    assert stats["graph_bytes"] == 1 << 20


def test_long_steps_are_named_in_the_table(hpu_duo: Run, arguments: list[str | Path]) -> None:
    result = hpu_duo(*arguments, "--max-new-tokens", "2", "--max-captured-tokens", "4")
    assert result.exit_code == 0, result.stderr
    assert "2 steps, too long to be captured" in result.stderr


def test_a_step_that_compiles_ends_the_command_with_its_bucket(
    hpu_duo: Run, arguments: list[str | Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HPUDuoModel, "warmup", lambda self: None)
    result = hpu_duo(*arguments, "--fail-on-recompile")
    assert result.exit_code == 2
    assert (
        "hpu-duo: error: expected nothing new to compile after warm-up, got the graph cache compiled c"
        in (result.stderr)
    )


def test_a_capture_backend_of_another_device_is_refused(hpu_duo: Run, model_dir: Path) -> None:
    result = hpu_duo("generate", "--model", model_dir, "--device", "cpu", "--prompt", "x", "--graphs", "cuda")
    assert result.exit_code == 2
    assert (
        "graphs='cuda' cannot be used: CUDA graphs record steps on device 'cuda', got 'cpu'" in result.stderr
    )


def test_a_step_that_no_bucket_holds_ends_the_command_with_its_shape(
    hpu_duo: Run, model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "buckets.txt").write_text("csu/q16/s0/u1/l1\n", encoding="utf-8")
    result = hpu_duo(
        *("generate", "--model", model_dir, "--prompt", "x" * 100, "--buckets", tmp_path / "buckets.txt")
    )
    assert result.exit_code == 2
    assert "hpu-duo: error: no bucket holds c--/q100/s0/u0/l1; nearest buckets: csu/q16" in result.stderr


def test_a_miss_ends_the_search_for_passkeys_with_its_shape(
    hpu_duo: Run, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(self: serving.Run, view: object) -> None:
        raise GraphMissError(Miss(BatchShape.parse("c--/q9/s0/u0/l1"), ()))

    monkeypatch.setattr(serving.Run, "finish", missing)
    result = hpu_duo("passkey", "--model", model_dir, "--num-tokens", "600", "--num-passkeys", "1")
    assert result.exit_code == 2
    assert "hpu-duo: error: no bucket holds c--/q9/s0/u0/l1; nearest buckets: none" in result.stderr


@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), ("warmup",)], ids=lambda each: each[0])
def test_prompts_that_continue_in_one_step_are_an_option(
    hpu_duo: Run, model_dir: Path, command: tuple[str, ...]
) -> None:
    result = hpu_duo(*command, "--model", model_dir, "--max-chunk-rows", "0")
    assert result.exit_code == 2
    assert "expected max_chunk_rows to be an integer >= 1, got 0" in result.stderr

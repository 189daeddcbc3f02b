"""``hpu-duo plan``: from a config.json to a table, and from a recording to a better one."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import Result

from graphs import BatchShape, StepLimits
from graphs.bucket_file import read_shapes, read_table
from graphs.planner import Traffic
from hpu_duo.llm import HPUDuoModel
from hpu_duo.planning.simulation import prior

Run = Callable[..., Result]
LIMITS = ("--max-num-seqs", 4, "--max-num-batched-tokens", 64, "--block-size", 16, "--num-blocks", 64)


@pytest.fixture
def config_dir(model_dir: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "config-only"
    directory.mkdir()
    (directory / "config.json").write_text((model_dir / "config.json").read_text())
    return directory


@pytest.mark.slow
def test_a_config_alone_gives_a_table_that_holds_everything(hpu_duo: Run, config_dir: Path) -> None:
    out, gaudi_out = config_dir / "table.txt", config_dir / "gaudi.txt"
    result = hpu_duo(
        *("plan", "--model", config_dir, *LIMITS, "--max-model-len", 512, "--graphs-budget", 8),
        *("--out", out, "--gaudi-out", gaudi_out),
    )
    assert result.exit_code == 0, result.stderr
    assert "query tokens" in result.stdout
    assert "planned" in result.stdout
    table = read_table(out)
    assert 1 <= len(table) <= 8
    assert table.envelope.holds(
        StepLimits(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=512,
            block_size=16,
            num_blocks=64,
            decode_len=1,
            max_chunk_rows=1,
        ).largest
    )
    assert gaudi_out.read_text().splitlines()[-1].startswith("(")
    assert read_table(gaudi_out)


def test_a_recording_makes_a_table_that_serves_the_same_prompts(
    hpu_duo: Run, model_dir: Path, tmp_path: Path
) -> None:
    shapes, out = tmp_path / "shapes.jsonl", tmp_path / "table.txt"
    prompts = ("--prompt", "Once upon a time", "--prompt", "there was", "--max-new-tokens", 6)
    serve = ("generate", "--model", model_dir, *prompts, *LIMITS, "--max-model-len", 512)
    free = hpu_duo(*serve, "--record-shapes", shapes)
    assert free.exit_code == 0, free.stderr
    assert sum(read_shapes(shapes).values()) >= 6
    planned = hpu_duo(
        *("plan", "--model", model_dir, *LIMITS, "--max-model-len", 512, "--from-shapes", shapes),
        *("--graphs-budget", 6, "--out", out, "--json"),
    )
    assert planned.exit_code == 0, planned.stderr
    report = json.loads(planned.stdout)["padding"]["planned"]
    assert report["missed"] == 0
    assert report["holds_all"]
    shown = hpu_duo(
        *("plan", "--model", model_dir, *LIMITS, "--max-model-len", 512, "--from-shapes", shapes),
        *("--graphs-budget", 2),
    )
    assert "Padding of the recorded steps themselves (later ones may pad more)" in shown.stdout
    padded = hpu_duo(*serve, "--buckets", out)
    assert padded.exit_code == 0, padded.stderr
    assert padded.stdout == free.stdout
    trimmed = hpu_duo(*serve, "--buckets", out, "--trim-chunks")
    assert trimmed.exit_code == 0, trimmed.stderr
    assert trimmed.stdout == free.stdout


@pytest.mark.slow
def test_assumed_traffic_is_measured_on_users_that_no_table_was_chosen_for(
    hpu_duo: Run, config_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noting(seeds: set[int]) -> Callable[..., Traffic]:
        def noted(limits: StepLimits, *, seed: int = 0, **others: Any) -> Traffic:
            seeds.add(seed)
            return prior(limits, seed, **others)

        return noted

    chosen_on: set[int] = set()
    measured_on: set[int] = set()
    monkeypatch.setattr("hpu_duo.planning.simulation.prior", noting(chosen_on))
    monkeypatch.setattr("hpu_duo.cli.planning.setting.prior", noting(measured_on))
    result = hpu_duo(
        *("plan", "--model", config_dir, *LIMITS, "--max-model-len", 64, "--graphs-budget", 64, "--json")
    )
    assert result.exit_code == 0, result.stderr
    assert chosen_on == {0, 1}
    assert len(measured_on) == 1
    assert not measured_on & chosen_on


@pytest.mark.slow
def test_a_table_for_rows_that_decode_several_tokens_serves_them(
    hpu_duo: Run, model_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "table.txt"
    arguments = (*LIMITS, "--max-model-len", 512, "--decode-len", 4, "--graphs-budget", 8)
    planned = hpu_duo("plan", "--model", model_dir, *arguments, "--out", out, "--json")
    assert planned.exit_code == 0, planned.stderr
    fields = json.loads(planned.stdout)
    assert fields["limits"]["decode_len"] == 4
    assert fields["padding"]["planned"]["holds_all"]
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16, "max_model_len": 512}
    texts = [[5] * 9, [7] * 30], [[[3, 4, 5, 6, 7], [8]], [[9] * 11]]
    scores = [
        HPUDuoModel.from_pretrained(model_dir, decode_len=4, **limits, **options).score(*texts)
        for options in ({"graphs": "eager"}, {"graphs": "replay", "buckets": out, "on_miss": "error"})
    ]
    free, padded = (np.concatenate([each.logprobs for one in found for each in one]) for found in scores)
    np.testing.assert_allclose(padded, free, atol=1e-4)


@pytest.mark.slow
def test_a_table_for_drafts_serves_them(hpu_duo: Run, model_dir: Path, tmp_path: Path) -> None:
    out, config = tmp_path / "table.txt", '{"num_speculative_tokens": 4}'
    arguments = (*LIMITS, "--max-model-len", 512, "--speculative-config", config, "--strategy", "thinned")
    planned = hpu_duo("plan", "--model", model_dir, *arguments, "--out", out, "--json")
    assert planned.exit_code == 0, planned.stderr
    buckets = list(map(BatchShape.parse, json.loads(planned.stdout)["buckets"]))
    decodes = [bucket for bucket in buckets if bucket.phase.unique and not bucket.phase.causal]
    lengths = Counter(bucket.query_len // bucket.num_logits for bucket in decodes)
    assert lengths[1] == lengths[4] == lengths[5] > 0
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16, "max_model_len": 512}
    served = HPUDuoModel.from_pretrained(
        model_dir, **limits, graphs="replay", buckets=out, on_miss="error", speculative_config=config
    )
    prompt = [[5, 6, 7, 8] * 6]
    expected = HPUDuoModel.from_pretrained(model_dir, **limits).generate(prompt, max_new_tokens=24)
    assert served.generate(prompt, max_new_tokens=24).tolist() == expected.tolist()


def test_the_table_is_the_same_whether_prompts_are_trimmed_or_not(hpu_duo: Run, config_dir: Path) -> None:
    limits = (*LIMITS, "--max-model-len", 512, "--strategy", "thinned", "--json")
    buckets = []
    for more in ((), ("--trim-chunks",)):
        result = hpu_duo("plan", "--model", config_dir, *limits, *more)
        assert result.exit_code == 0, result.stderr
        fields = json.loads(result.stdout)
        assert fields["padding"]["thinned"]["missed"] == 0
        buckets.append(fields["buckets"])
    assert buckets[0] == buckets[1]


def test_compare_shows_every_strategy(hpu_duo: Run, config_dir: Path) -> None:
    result = hpu_duo(
        *("plan", "--model", config_dir, *LIMITS, "--max-model-len", 512, "--compare", "--json"),
        *("--graphs-budget", 8),
    )
    assert result.exit_code == 0, result.stderr
    fields = json.loads(result.stdout)
    assert "buckets" not in fields, "no single table is asked for"
    assert set(fields["padding"]) == {
        "planned",
        "thinned",
        "upstream-unified",
        "exponential",
        "linear",
        "padding-aware",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--strategy", "guess"), "expected --strategy to be one of planned"),
        (("--graphs-budget", 0), "at least 1 graph, got 0"),
        (("--from-shapes", "missing.jsonl"), "cannot read recorded shapes from missing.jsonl"),
        (("--max-num-seqs", 0), "expected max_num_seqs >= 1, got 0"),
        (("--decode-len", 0), "expected decode_len >= 1, got 0"),
        (("--trim-chunks", "--compare"), "expected --trim-chunks without --compare"),
        (("--trim-chunks", "--from-shapes", "x"), "expected --trim-chunks without --from-shapes"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(
    hpu_duo: Run, config_dir: Path, arguments: tuple[str, object], message: str
) -> None:
    result = hpu_duo("plan", "--model", config_dir, "--num-blocks", 64, "--block-size", 16, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("option", ["--out", "--gaudi-out"])
@pytest.mark.parametrize("file", ["/nowhere/at/all", "/"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_planned(
    hpu_duo: Run, tmp_path: Path, option: str, file: str
) -> None:
    # There is no model to read, so nothing was planned.
    result = hpu_duo("plan", "--model", tmp_path / "absent", "--num-blocks", 64, option, file)
    assert result.exit_code == 2
    assert (
        f"expected {option} to be a file in a directory that can be written to, got {file}" in result.stderr
    )


def test_a_model_refuses_a_file_that_is_no_table(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    path.write_text("--u/q1\n")
    with pytest.raises(ValueError, match=r"table\.txt, line 1: expected a shape"):
        HPUDuoModel.from_pretrained(model_dir, buckets=path)


HARDWARE = (
    *("--hardware", "gaudi3", "--max-num-seqs", 4, "--max-num-batched-tokens", 64, "--block-size", 16),
    *("--context", 256, 1024, "--sparsity", 0.5, "--kv-cache-dtype", "bf16", "--sink", 8, "--recent", 24),
)


@pytest.mark.slow
def test_hardware_gives_the_blocks_and_a_picture_of_what_fits(
    hpu_duo: Run, config_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "plan.png"
    result = hpu_duo(
        *("plan", "--model", config_dir, *HARDWARE, "--graphs-budget", 6, "--max-model-len", 1024),
        *("--png", png, "--kv-offloading-size", 1, "--kv-offloading-disk-size", 2, "--disk-rate", "1GB/s"),
        *("--offload-policy", "50,25,100,0,100,0", "--link", "8GB/s"),
    )
    assert result.exit_code == 0, result.stderr
    assert png.read_bytes().startswith(b"\x89PNG\r\n")
    words = " ".join(result.stdout.split())
    for text in ("Gaudi 3", "Requests that fit at once", "50% bf16", "Table for", "query tokens", "planned"):
        assert text in words
    assert "this project has not measured any Gaudi" in words
    for text in ("Tokens that fit on the host", "from the disk; binds: disk", "weights on device"):
        assert text in words


@pytest.mark.slow
@pytest.mark.exhaustive
def test_budgets_of_time_and_memory_bound_the_table(hpu_duo: Run, config_dir: Path) -> None:
    def planned(*arguments: object) -> dict[str, object]:
        result = hpu_duo(
            "plan", "--model", config_dir, *HARDWARE, "--max-model-len", 512, "--json", *arguments
        )
        assert result.exit_code == 0, result.stderr
        fields: dict[str, object] = json.loads(result.stdout)
        return fields

    free = planned("--graphs-budget", 6)
    in_time = planned("--graphs-budget", 6, "--max-seconds", 10, "--seconds-per-graph", 3)
    in_memory = planned("--graphs-budget", 6, "--max-gib", 0.003)
    counts = [len(fields["buckets"]) for fields in (free, in_time, in_memory)]  # type: ignore[arg-type]
    assert counts[0] == 6
    assert counts[1] == 3
    assert 1 <= counts[2] < 6
    capacities = in_time["hardware"]["capacities"]  # type: ignore[index]
    assert [one["warm_up"]["num_graphs"] for one in capacities] == [3]
    # Four requests of 512 tokens: more blocks would never be used.
    assert free["limits"]["num_blocks"] == 4 * 512 // 16  # type: ignore[index]


def test_warm_up_is_that_of_the_table_where_one_is_planned(hpu_duo: Run, config_dir: Path) -> None:
    small = (
        *("--hardware", "gaudi3", "--max-num-seqs", 1, "--max-num-batched-tokens", 4, "--block-size", 16),
        *("--max-model-len", 32, "--context", 32, "--kv-cache-dtype", "bf16", "--sparsity", 0.5, 0.75),
    )
    result = hpu_duo("plan", "--model", config_dir, *small, "--json")
    assert result.exit_code == 0, result.stderr
    fields = json.loads(result.stdout)
    planned, other = (one["warm_up"] for one in fields["hardware"]["capacities"])
    assert planned["num_graphs"] == len(fields["buckets"]) < 64
    # Graphs of these buckets have as many operators as published ones at least.
    assert 0.7 * planned["num_graphs"] < planned["low_s"] - planned["trace_s"][0] < planned["high_s"]
    assert planned["operators"][0] <= planned["operators"][1] < 600
    assert (planned["is_bound"], other["is_bound"], other["num_graphs"]) == (False, True, 64)
    memory = fields["graph_memory"]
    assert 0 < memory["kept_bytes"] < memory["reserved_bytes"]
    shown = " ".join(hpu_duo("plan", "--model", config_dir, *small).stdout.split())
    assert "graphs keep up to" in shown
    assert f"50% bf16 {planned['num_graphs']} " in shown
    assert "75% bf16 at most 64 " in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected --num-blocks, or --hardware"),
        (("--num-blocks", 8, "--sparsity", 0.5), "expected --hardware with --sparsity"),
        (("--num-blocks", 8, "--kv-offloading-size", 1), "expected --hardware with --kv-offloading-size"),
        (("--hardware", "gaudi1"), "expected hardware gaudi2 or gaudi3"),
        (("--hardware", "gaudi3", "--png", "plan.jpg"), ".png"),
        (("--num-blocks", 8, "--max-seconds", 1), "does not hold the smallest table"),
        (("--num-blocks", 8, "--max-gib", 1e-9), "does not hold the smallest table"),
        (("--num-blocks", 8, "--max-gib", -1), "above 0"),
        (("--hardware", "gaudi3", "--context", 10**6), "expected contexts of 1 to 4096 tokens"),
    ],
)
def test_hardware_and_budgets_that_make_no_sense_are_refused(
    hpu_duo: Run, config_dir: Path, arguments: tuple[object, ...], message: str
) -> None:
    result = hpu_duo("plan", "--model", config_dir, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr

"""``hpu-duo simulate``: policies side by side, from a config.json to a table, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from hpu_duo.lab.traces import Arrival
from hpu_duo.lab.traces.readers.mooncake import write_mooncake

Run = Callable[..., Result]
SMALL = ("--max-model-len", 512, "--max-num-seqs", 4, "--max-num-batched-tokens", 64, "--block-size", 16)
WORK = ("--workload", "flood:num_users=1,per_s=500,flood_per_s=2000,prompts=40,outputs=12")


@pytest.fixture
def config_dir(model_dir: Path, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    return tmp_path


def test_policies_stand_side_by_side_and_in_the_result(hpu_duo: Run, config_dir: Path) -> None:
    out, plot = config_dir / "result.json", config_dir / "picture.svg"
    result = hpu_duo(
        *("simulate", "--model", config_dir, *SMALL, *WORK, "--num-requests", 60, "--num-blocks", 24),
        *("--scheduling-policy", "fcfs", "priority:patience=5", "--percentiles", 50, 90),
        *("--out", out, "--plot", plot),
    )
    assert result.exit_code == 0, result.stderr
    assert "fcfs" in result.stdout
    assert "priority:patience=5" in result.stdout
    assert "60 of 60" in result.stdout
    fields = json.loads(out.read_text())
    assert fields["format"] == "hpu-duo simulate 1"
    assert fields["limits"]["num_blocks"] == 24
    assert [run["scheduling_policy"] for run in fields["runs"]] == ["fcfs", "priority:patience=5"]
    first = fields["runs"][0]
    assert first["completed"] == 60
    assert first["total_output_tokens"] == 60 * 12
    assert first["p50_ttft_ms"] <= first["p90_ttft_ms"]
    assert set(first["service"]) == {"flooder", "user 0"}
    assert set(first["mean_e2el_by_user"]) == {"flooder", "user 0"}
    assert first["largest_service_difference"] > 0
    assert 0 < first["padding"] < 1
    assert plot.read_text().startswith("<?xml")


def test_drafts_that_are_accepted_save_time(hpu_duo: Run, config_dir: Path) -> None:
    work = ("--workload", "flood:num_users=1,per_s=500,flood_per_s=2000,prompts=40,outputs=64")
    seconds = []
    for accepted in (None, 1, 5):
        drafts = ("--speculative-config", '{"num_speculative_tokens": 8}', "--acceptance-length", accepted)
        more = () if accepted is None else drafts
        result = hpu_duo(
            *("simulate", "--model", config_dir, *SMALL, *work, "--num-requests", 20, "--json"), *more
        )
        assert result.exit_code == 0, result.stderr
        [run] = json.loads(result.stdout)["runs"]
        assert (run["completed"], run["total_output_tokens"]) == (20, 20 * 64)
        seconds.append(run["duration"])
    assert seconds[2] < 0.8 * seconds[0]
    assert seconds[1] < 1.03 * seconds[0]
    result = hpu_duo("simulate", "--model", config_dir, *SMALL, *work, "--acceptance-length", 3)
    assert "--speculative-config and --acceptance-length, both or none" in result.stderr
    by_model = ("--speculative-config", '{"method": "duo"}', "--acceptance-length", 3)
    result = hpu_duo("simulate", "--model", config_dir, *SMALL, *work, *by_model)
    assert "method suffix or ngram, whose drafts take no time of the device, got 'duo'" in result.stderr


def test_the_same_seed_gives_the_same_run_and_picture(hpu_duo: Run, config_dir: Path) -> None:
    pictures = [config_dir / "one.svg", config_dir / "two.svg"]
    runs = [
        hpu_duo("simulate", "--model", config_dir, *SMALL, *WORK, "--num-requests", 20, "--json", *more)
        for more in (("--plot", pictures[0]), ("--plot", pictures[1]), ("--seed", 1))
    ]
    assert runs[0].stdout == runs[1].stdout != runs[2].stdout
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_a_chat_hits_what_it_has_said_if_prefixes_are_cached(hpu_duo: Run, config_dir: Path) -> None:
    chats = (
        "--workload",
        "chats:per_s=100,turns=4,messages=20,outputs=20,system_len=64",
        "--num-requests",
        40,
    )
    arguments = ("simulate", "--model", config_dir, *SMALL, *chats, "--json")
    rates = [
        json.loads(hpu_duo(*arguments, *more).stdout)["runs"][0]["prefix_hit_rate"]
        for more in (("--no-enable-prefix-caching",), ("--enable-prefix-caching",))
    ]
    assert rates[0] == 0
    assert rates[1] > 0.5
    # With streaming heads hits need snapshots.
    streaming = ("--sparsity", 0.5, "--sink", 4, "--recent", 12, "--enable-prefix-caching")
    fields = json.loads(hpu_duo(*arguments, *streaming, "--num-prefix-snapshots", 3).stdout)
    assert fields["limits"]["num_snapshots"] == 3
    assert 0 < fields["runs"][0]["prefix_hit_rate"] <= rates[1]


def test_a_learned_ranking_is_simulated_between_none_and_known_lengths(
    hpu_duo: Run, config_dir: Path
) -> None:
    trace, ranker = config_dir / "trace.jsonl", config_dir / "ranker"
    # Beginnings tell which outputs are long, and whoever comes first asks for much.
    write_mooncake(trace, [Arrival(0.0, 40, 150 if at < 30 else 5, (int(at < 30),), 32) for at in range(60)])
    trained = hpu_duo("train-ranker", trace, "--output", ranker)
    assert trained.exit_code == 0, trained.stderr
    arguments = ("simulate", "--model", config_dir, *SMALL, "--trace", trace, "--json", "--scheduling-policy")
    learned = json.loads(hpu_duo(*arguments, "fcfs", "ltr:idle=inf", "--ranker", ranker).stdout)
    known = json.loads(hpu_duo(*arguments, "ltr:idle=inf").stdout)
    fcfs, ltr, best = (run["mean_e2el_ms"] for run in (*learned["runs"], *known["runs"]))
    assert best == ltr < 0.8 * fcfs
    assert (learned["ranker"], known["ranker"]) == ("ranker", None)


def test_a_ranker_of_texts_needs_their_own_lengths_and_a_policy_that_looks_at_scores(
    hpu_duo: Run, config_dir: Path, model_dir: Path
) -> None:
    talk = [{"from": "human", "value": "Tell me much."}, {"from": "gpt", "value": "All of it."}]
    texts = config_dir / "sharegpt.json"
    texts.write_text(json.dumps([{"id": "a", "conversations": talk}] * 8))
    ranker, tokenizer = config_dir / "ranker", ("--tokenizer", model_dir / "tokenizer.json")
    trained = hpu_duo("train-ranker", texts, *tokenizer, "--output", ranker)
    assert trained.exit_code == 0, trained.stderr
    asked = ("simulate", "--model", config_dir, *SMALL, "--trace", texts, *tokenizer, "--ranker", ranker)
    done = hpu_duo(*asked, "--scheduling-policy", "ltr")
    assert done.exit_code == 0, done.stderr
    assert "8 of 8" in done.stdout
    for more, message in (
        (
            ("--scheduling-policy", "ltr", "--length-scale", 2),
            "expected --length-scale 1 for a ranker of texts",
        ),
        ((), "expected --ranker with a policy that needs one, ltr, got fcfs"),
    ):
        refused = hpu_duo(*asked, *more)
        assert refused.exit_code == 2
        assert message in refused.stderr


def test_a_trace_is_served_and_what_does_not_fit_is_counted(hpu_duo: Run, config_dir: Path) -> None:
    trace = config_dir / "trace.jsonl"
    write_mooncake(trace, [Arrival(0.1 * at, 100 if at else 600, 5, user="ann") for at in range(8)])
    arguments = ("simulate", "--model", config_dir, *SMALL, "--trace", trace)
    result = hpu_duo(*arguments, "--speed", 2)
    assert result.exit_code == 0, result.stderr
    assert "7 of 7" in result.stdout
    assert "1 requests were left out" in result.stderr
    cut = hpu_duo(*arguments, "--request-rate", "inf", "--until", 1e-9)
    assert "0 of 7" in cut.stdout
    assert "7 requests did not end" in cut.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected --model or --step-times, one of them"),
        (("--model", "{}", "--scheduling-policy", "lottery"), "expected scheduling_policy to be one of fcfs"),
        (("--model", "{}", "--scheduling-policy", "fcfs", "fcfs"), "expected different policies"),
        (("--model", "{}", "--workload", "rain"), "expected workload to be one of poisson"),
        (("--model", "{}", "--workload", "chats:rain=3"), "expected options of workload 'chats'"),
        (("--model", "{}", "--workload", "poisson:outputs=x"), "expected a length such as 512"),
        (("--model", "{}", "--workload", "poisson:per_s=0"), "expected per_s above 0"),
        (("--model", "{}", "--workload", "poisson:prompts=9000"), "expected a request of at most 512 tokens"),
        (
            ("--model", "{}", "--workload", "chats:per_s=2,system_len=600"),
            "--workload chats:per_s=2,messages=19~1,outputs=57~0.8,system_len=179",
        ),
        (("--model", "{}", "--request-rate", 3), "expected --request-rate with --trace"),
        (("--model", "{}", "--num-requests", 0), "expected --num-requests of at least 1"),
        (("--model", "{}", "--trace", "missing.csv"), "cannot read the trace missing.csv"),
        (("--model", "{}", "--until", 0), "expected --until above 0"),
        (("--model", "{}", "--percentiles", 101), "expected --percentiles from 0 to 100"),
        (("--model", "{}", "--plot", "a.pdf"), "expected a file name that ends in .svg or .png"),
        (("--model", "{}", "--hardware", "gaudi9"), "gaudi9"),
        (
            ("--model", "{}", "--num-prefix-snapshots", 2, "--no-enable-prefix-caching"),
            "--num-prefix-snapshots",
        ),
        (("--step-times", "missing.json"), "cannot read the step times missing.json"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_a_sentence(
    hpu_duo: Run, config_dir: Path, arguments: tuple[object, ...], message: str
) -> None:
    given = [str(each).replace("{}", str(config_dir)) for each in arguments]
    result = hpu_duo("simulate", *SMALL[: 2 if "--model" in given else 0], *given)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_steps_measured_here_are_simulated_with(hpu_duo: Run, model_dir: Path, tmp_path: Path) -> None:
    steps = tmp_path / "steps.json"
    engine = ("--max-model-len", 128, "--max-num-seqs", 2, "--max-num-batched-tokens", 32, "--block-size", 16)
    measured = hpu_duo("bench", "steps", "--model", model_dir, *engine, "--max-seconds", 1, "--out", steps)
    assert measured.exit_code == 0, measured.stderr
    assert "--u" in measured.stdout
    work = ("--workload", "poisson:per_s=inf,prompts=20,outputs=5", "--num-requests", 9)
    result = hpu_duo("simulate", "--step-times", steps, *work, "--max-num-seqs", 1, "--json")
    assert result.exit_code == 0, result.stderr
    fields = json.loads(result.stdout)
    assert fields["limits"]["max_num_seqs"] == 1
    assert fields["limits"]["max_model_len"] == 128
    assert fields["runs"][0]["completed"] == 9
    refused = hpu_duo("simulate", "--step-times", steps, *work, "--block-size", 32)
    assert refused.exit_code == 2
    assert "expected --block-size 16" in refused.stderr
    nonsense = hpu_duo("bench", "steps", "--max-seconds", 0, "--out", steps)
    assert "expected --max-seconds above 0" in nonsense.stderr


def run_of_chats(hpu_duo: Run, config_dir: Path, pause_s: float, *options: object) -> dict[str, Any]:
    """Simulate chats of four turns on a device of 40 blocks; returns the fields of the run."""
    chats = f"chats:per_s=200,turns=4,pause_s={pause_s},messages=32,outputs=8,system_len=16,num_users=4"
    sizes = "--model", config_dir, *SMALL, "--workload", chats, "--num-blocks", 40
    result = hpu_duo("simulate", *sizes, "--json", *options)
    assert result.exit_code == 0, result.stderr
    [found] = json.loads(result.stdout)["runs"]
    return dict(found)


def test_host_memory_brings_chats_back_at_the_speed_of_the_link(hpu_duo: Run, config_dir: Path) -> None:
    def run(*more: object) -> dict[str, Any]:
        return run_of_chats(hpu_duo, config_dir, 0.05, "--num-requests", 60, *more)

    without, fast, slow = (
        run(*each)
        for each in ((), ("--kv-offloading-size", 0.5), ("--kv-offloading-size", 0.5, "--link", "1kB/s"))
    )
    assert "offload" not in without
    assert fast["offload"]["num_hit_tokens"] > 0
    assert fast["prefix_hit_rate"] > without["prefix_hit_rate"]
    assert slow["offload"]["num_hit_tokens"] == 0
    assert slow["offload"]["num_lost"] > 0  # nothing has arrived on the host
    assert fast["offload"]["stored_bytes"] > fast["offload"]["loaded_bytes"] > 0


def test_a_disk_and_swap_space_bring_back_what_the_host_cannot_hold(hpu_duo: Run, config_dir: Path) -> None:
    """Of chats that come back after others have filled host memory."""

    def run(*more: object) -> dict[str, Any]:
        sizes = "--num-requests", 120, "--kv-offloading-size", 0.0003
        return run_of_chats(hpu_duo, config_dir, 0.5, *sizes, *more)

    on_host = run()
    disk = ("--kv-offloading-disk-size", 0.5)
    fast, slow = run(*disk), run(*disk, "--disk-rate", "1kB/s")
    swapped = run("--preemption-mode", "swap", "--swap-space", 0.1)
    assert on_host["offload"]["disk_read_bytes"] == on_host["offload"]["num_swapped"] == 0
    assert fast["offload"]["num_disk_hit_tokens"] > 0
    assert fast["offload"]["disk_written_bytes"] >= fast["offload"]["disk_read_bytes"] > 0
    assert fast["offload"]["num_hit_tokens"] > on_host["offload"]["num_hit_tokens"]
    assert slow["offload"]["num_disk_hit_tokens"] < fast["offload"]["num_disk_hit_tokens"]
    assert swapped["num_preemptions"] == swapped["offload"]["num_swapped"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--swap-space", 1), "expected swap_space with preemption_mode 'swap' or 'auto'"),
        (
            ("--preemption-mode", "swap", "--swap-space", 1e-6),
            "expected --swap-space of one block or more",
        ),
        (
            ("--kv-offloading-disk-size", 1e-6),
            "expected kv_offloading_disk_size of one record or more",
        ),
        (("--link", "fast"), "expected --link in bytes a second such as 32GB/s, got 'fast'"),
        (("--replicas", 2), "expected --kv-offloading-size without --replicas"),
        (("--no-enable-prefix-caching",), "expected --kv-offloading-size with --enable-prefix-caching"),
    ],
)
def test_host_memory_that_cannot_be_simulated_is_one_sentence(
    hpu_duo: Run, config_dir: Path, options: tuple[object, ...], message: str
) -> None:
    result = hpu_duo("simulate", "--model", config_dir, *SMALL, *WORK, "--kv-offloading-size", 0.1, *options)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")

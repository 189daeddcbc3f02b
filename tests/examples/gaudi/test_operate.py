"""The scripts beside launch.sh: an archive without prompts, two servers in one table, alerts."""

from __future__ import annotations

import json
import re
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from hpu_duo.server.telemetry.metrics import ServerMetrics
from tests.engine.tiny import make_tiny
from tests.examples.gaudi.gaudi_server import GAUDI, GAUDI3, SIMULATED, Server, refusal
from tests.load.stub_server import DONE, Answer, StubServer, token, usage

OPERATE = GAUDI / "operate"
ALERTS: dict[str, Any] = yaml.safe_load((OPERATE / "alerts.yaml").read_text(encoding="utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
SECRETS = ("hf_abcdefgh1234", "sk-abcdefgh1234", "my secret question", "my secret answer", "let-me-in")


@pytest.mark.slow
def test_a_report_has_what_a_reader_asks_first_and_no_prompt_or_key(server: Server, tmp_path: Path) -> None:
    server.has_cards(GAUDI3)
    log, calls, settings = tmp_path / "serve.log", tmp_path / "calls.jsonl", tmp_path / "my.env"
    log.write_text(
        "launch: hpu-duo serve --model m --api-key let-me-in --port 8000\n"
        "Authorization: Bearer sk-abcdefgh1234\nhpu-duo: serving m at http://127.0.0.1:8000\n"
    )
    line = {"id": "cmpl-1", "prompt_tokens": 12, "prompts": ["my secret question"]}
    calls.write_text(json.dumps({**line, "choices": [{"text": "my secret answer"}]}) + "\n")
    server.state.mkdir()
    (server.state / "warm.json").write_text('{"format": "hpu-duo warm-up manifest"}')
    settings.write_text(
        f"DEVICE=cpu\nSTATE_DIR={server.state}\nHF_TOKEN=hf_abcdefgh1234\nMAX_NUM_BATCHED_TOKENS=64\n"
    )
    archive = tmp_path / "report.tar.gz"
    # tests/selftest has the stages themselves.
    server.has_command(
        "hpu-duo",
        '#!/bin/sh\n[ "$1" = selftest ] || exec python3 -m hpu_duo.cli "$@"\n'
        '[ "$2 $3 $4 $5 $6" = "--device cpu --only machine --output" ] && echo {} >"$7/selftest.json"\n',
    )
    done = server.run(
        str(OPERATE / "collect.sh"),
        *("--env", str(settings), "--log", str(log), "--log", str(calls), "--out", str(archive)),
        *("--url", "http://127.0.0.1:1"),
        HF_TOKEN="hf_abcdefgh1234",
        HPU_DUO_API_KEY="let-me-in",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(archive)
    with tarfile.open(archive) as opened:
        files = {
            Path(member.name).name: opened.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in opened.getmembers()
            if member.isfile()
        }
    assert {"doctor.json", "selftest.json", "packages.txt", "warm.json", "hl-smi-cards.csv"} <= set(files)
    assert "HL-325L" in files["hl-smi-cards.csv"]
    assert '"prompt_tokens": 12' in files["log-2-calls.jsonl"]
    assert "hpu-duo: serving m at" in files["log-1-serve.log"]
    assert "MAX_NUM_BATCHED_TOKENS=64" in files["settings.env"]
    assert json.loads(files["doctor.json"])
    assert "torch==" in files["packages.txt"]
    everything = "\n".join(files.values())
    for secret in SECRETS:
        assert secret not in everything, secret


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("collect.sh", ("--log",), "expected a value behind --log"),
        ("collect.sh", ("--logs", "x"), "expected --env, --url, --log"),
        ("collect.sh", ("--env", "/nowhere"), "'/nowhere'"),
        ("bench.sh", ("--only", "both"), "expected --only ours or --only theirs"),
        ("bench.sh", ("--num-prompts", "3"), "behind --"),
        ("profile.sh", (), "expected --env"),
        ("profile.sh", ("--env", SIMULATED, "--steps", "0"), "at least 1, got '0'"),
    ],
)
def test_wrong_arguments_end_with_one_sentence(
    server: Server, script: str, arguments: tuple[str, ...], said: str
) -> None:
    assert said in refusal(server.run(str(OPERATE / script), *arguments))


@pytest.mark.parametrize("script", ["collect.sh", "bench.sh", "profile.sh"])
def test_every_script_says_how_it_is_used(server: Server, script: str) -> None:
    shown = server.run(str(OPERATE / script), "--help")
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"Usage: {script} ")


def answers(words: int) -> Answer:
    """A stream of so many tokens."""
    last = token("word", "length")
    return Answer([*(token("word") for _ in range(words - 1)), last, usage(4, words), DONE])


@pytest.mark.slow
def test_two_servers_are_two_rows_of_one_table(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "bench"
    options = ("--num-prompts", "3", "--request-rate", "inf", "--input-len", "4", "--output-len", "5")
    command = (str(OPERATE / "bench.sh"), "--out", str(out))
    with (
        closing(StubServer(lambda _: answers(5))) as ours,
        closing(StubServer(lambda _: answers(2))) as theirs,
    ):
        first = server.run(*command, "--only", "ours", "--ours", ours.address, "--", *options)
        assert first.returncode == 0, first.stderr
        assert "theirs.json is not measured yet" in first.stdout
        second = server.run(*command, "--only", "theirs", "--theirs", theirs.address, "--", *options)
        assert second.returncode == 0, second.stderr
        other = server.run(
            *command, "--only", "theirs", "--theirs", theirs.address, "--", *options, "--seed", "5"
        )
    rows = [line for line in second.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert rows[2].startswith("| ours | ")
    assert rows[3].startswith("| theirs | ")
    assert "differs" not in second.stdout
    assert "note: seed differs, so the rows do not compare: ours 0, theirs 5" in other.stdout


def test_a_server_that_does_not_answer_is_told(server: Server, tmp_path: Path) -> None:
    options = ("--num-prompts", "1", "--ready-timeout", "0")
    said = refusal(
        server.run(
            str(OPERATE / "bench.sh"),
            *("--out", str(tmp_path), "--only", "theirs", "--theirs", "http://127.0.0.1:1", "--", *options),
        )
    )
    assert "theirs at http://127.0.0.1:1 was not measured" in said


def test_alerts_have_names_of_their_own_words_and_a_thing_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "action"}


def test_alerts_watch_recompilations_padding_memory_and_queue() -> None:
    watched = " ".join(rule["expr"] for rule in RULES)
    for name in ("recompilations", "padded_tokens", "kv_cache_usage_perc", "num_requests_waiting"):
        assert f"hpuduo:{name}" in watched


def test_every_expression_is_promql_about_metrics_that_the_server_has(tmp_path: Path) -> None:
    model = make_tiny(tmp_path).load()
    metrics = ServerMetrics("tiny", model.stats, lambda: 0, lambda: 0, lambda: 0)
    metrics.responded("GET", "/health", 200)
    names = {sample.name for metric in metrics.collect() for sample in metric.samples} | {"up"}
    for rule in RULES:
        promql_parser.parse(rule["expr"])
        without_labels = re.sub(r"\{[^}]*\}", "", rule["expr"])
        named = set(re.findall(r"\b(?:hpuduo:\w+|http_\w+|up)\b", without_labels))
        assert named, rule["expr"]
        assert named <= names, named - names
    with pytest.raises(ValueError):
        promql_parser.parse("rate(hpuduo:steps_total[5m]) >")

"""``hpu-duo capacity`` from a config.json alone."""

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner, Result

from hpu_duo.cli.app import app
from hpu_duo.cli.planning.offload import Tier
from hpu_duo.cli.planning.tables import hardware_table, print_report
from hpu_duo.extras import install_command
from hpu_duo.heads import HeadPattern
from hpu_duo.planning import GAUDI2, GAUDI3, CapacityPoint, Serving, capacity
from hpu_duo.planning.read_model import read_mtp_layers
from kernels_ref import PLAIN
from kernels_ref.formats import format_of
from tests.cost.sizes import LLAMA_3_1_8B, tiny
from tests.modeling.families import VERSION, make_config

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def config_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "Llama-3.1-8B"
    LlamaConfig(**LLAMA_3_1_8B).save_pretrained(directory)
    return directory


@pytest.fixture
def hpu_duo(config_dir: Path) -> Run:
    def run(*arguments: str | Path) -> Result:
        words = ["capacity", "--model", str(config_dir), *map(str, arguments)]
        return CliRunner().invoke(app, words, env={"COLUMNS": "120"})

    return run


def test_the_tables_show_every_context_choice_and_the_caveat(hpu_duo: Run) -> None:
    result = hpu_duo("--hardware", "gaudi2")
    assert result.exit_code == 0, result.stderr
    words = " ".join(result.stdout.split())
    for text in ("Gaudi 2", "8.03G parameters", "8,192", "131,072", "none bf16", "75% fp8", "graphs"):
        assert text in words
    assert "524,288" not in words
    assert "this project has not measured any Gaudi" in words
    assert "longer contexts and streaming heads are extrapolated" in words


def test_json_holds_what_the_library_computes(hpu_duo: Run, config_dir: Path) -> None:
    from hpu_duo.planning.read_model import read_model

    result = hpu_duo("--devices", "2", "--sparsity", "0", "0.5", "--context", "8192", "4096", "--json")
    assert result.exit_code == 0, result.stderr
    fields = json.loads(result.stdout)
    assert fields["is_measured_by_this_project"] is False
    assert fields["held_out_median_error"] < 0.25
    assert [(one["sparsity"], one["kv_format"]) for one in fields["capacities"]] == [
        (0.0, "bf16"),
        (0.0, "fp8"),
        (0.5, "bf16"),
        (0.5, "fp8"),
    ]
    serving = Serving(GAUDI3, num_devices=2)
    expected = capacity(read_model(config_dir), serving, 0.5, format_of("fp8"), (8192, 4096))
    for found, point in zip(fields["capacities"][3]["points"], expected.points, strict=True):
        assert {**found, **{name: tuple(found[name]) for name in found if name.endswith("_range")}} == (
            point.__dict__
        )


def test_the_output_says_what_is_priced_only_and_how_sure_the_figures_are(hpu_duo: Run) -> None:
    plain = " ".join(hpu_duo("--sparsity", "0", "--kv-cache-dtype", "bf16").stdout.split())
    priced = ("--devices", "2", "--quantization", "int8", "--sparsity", "0")
    words = " ".join(hpu_duo(*priced).stdout.split())
    assert "46 of the 47 published figures are of fp8, and the one of bf16 is among those" in plain
    assert "by a factor 1.9 either way" in plain
    assert "unknown until a Gaudi has run" in plain
    assert "priced only" not in plain
    assert "none fp8 *" in words
    assert "this version does not run int8 weights" in words
    fields = json.loads(hpu_duo(*priced, "--json").stdout)
    assert fields["not_served"] == ["int8 weights"]
    assert fields["published_figures"] == {"fp8": 46, "bf16": 1}
    assert fields["capacities"][0]["not_served"] == ["int8 weights"]
    assert fields["capacities"][1]["not_served"] == ["int8 weights"]
    assert fields["capacities"][0]["error_factor"] == fields["error_factors"]["bf16"]
    assert "Synapse" in fields["warm_up_unknown"]
    point = fields["capacities"][0]["points"][0]
    low, high = point["first_token_s_range"]
    assert low < point["first_token_s"] < high


@pytest.mark.parametrize(
    "arguments",
    [
        ("--context", "100", "200", "300"),
        ("--context", "100", "--context", "200", "300"),
        ("--context=100", "200", "--sparsity", "0", "--context", "300"),
    ],
)
def test_several_values_may_follow_one_name(hpu_duo: Run, arguments: tuple[str, ...]) -> None:
    fields = json.loads(hpu_duo(*arguments, "--json").stdout)
    assert [point["context"] for point in fields["capacities"][0]["points"]] == [100, 200, 300]


def test_a_pattern_is_taken_with_its_window_and_told(hpu_duo: Run, tmp_path: Path) -> None:
    HeadPattern.random(32, 8, seed=0, sink=16, recent=48).save(tmp_path)
    fields = json.loads(hpu_duo("--pattern", tmp_path, "--sparsity", "0.5", "--json").stdout)
    assert fields["serving"]["pattern"] == str(tmp_path)
    assert (fields["serving"]["sink"], fields["serving"]["recent"]) == (16, 48)
    assert fields["capacities"][0]["num_promoted"] > 0
    assert fields["capacities"][0]["warm_up"]["num_layer_kinds"] == 4
    words = " ".join(hpu_duo("--pattern", tmp_path, "--sparsity", "0.5").stdout.split())
    assert "recipes" in words
    assert "promoted heads" in words or "promoted" in words
    assert "keep 16 first and 48 newest" in words


def test_what_graphs_keep_is_shown_however_little_is_reserved(hpu_duo: Run) -> None:
    one = "--sparsity", "0", "--kv-cache-dtype", "bf16", "--context", "131072"

    def memory(*arguments: str) -> dict[str, int]:
        fields = json.loads(hpu_duo(*one, *arguments, "--json").stdout)
        found: dict[str, int] = fields["capacities"][0]["graph_memory"]
        return found

    usual, less = memory(), memory("--graph-memory", "0.01")
    assert usual["kept_bytes"] > usual["fused_bytes"] > usual["reserved_bytes"] > less["reserved_bytes"]
    assert less["fused_bytes"] > 0.9 * usual["fused_bytes"] > less["reserved_bytes"]
    assert usual["fused_blocks"] == usual["fused_bytes"] >> 24
    by_heads, by_context = (
        memory("--devices", "8", "--retrieval-parallel", each) for each in ("heads", "context")
    )
    # All heads meet an eighth of the tokens, instead of an eighth of the heads all of them.
    assert 0.5 < by_context["fused_bytes"] / by_heads["fused_bytes"] < 4
    words = " ".join(hpu_duo(*one).stdout.split())
    assert f"none bf16 {usual['num_graphs']} " in words


def test_underscores_are_as_good_as_dashes(hpu_duo: Run) -> None:
    fields = json.loads(hpu_duo("--kv_cache_dtype", "fp8", "bf16", "--json").stdout)
    assert [one["kv_format"] for one in fields["capacities"][:2]] == ["fp8", "bf16"]


def test_a_picture_is_written(hpu_duo: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    # At 524,288 tokens of full attention in bf16 nothing fits on one device.
    LlamaConfig(**{**LLAMA_3_1_8B, "max_position_embeddings": 2**20}).save_pretrained(tmp_path)
    png = tmp_path / "capacity.png"
    result = hpu_duo(
        "--model", tmp_path, "--hardware", "gaudi2", "--context", "8192", "1048576", "--png", png
    )
    assert result.exit_code == 0, result.stderr
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width > 1000
    assert height > 500


def test_without_matplotlib_a_picture_is_refused_and_tables_are_not(
    hpu_duo: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("hpu_duo.cli.terminal.find_spec", lambda name: None)
    refused = hpu_duo("--png", tmp_path / "a.png")
    assert refused.exit_code == 2
    assert install_command("plot") in refused.stderr
    assert hpu_duo("--context", "100").exit_code == 0
    assert "matplotlib" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--hardware", "gaudi1"), "expected hardware gaudi2 or gaudi3, got 'gaudi1'"),
        (("--devices", "3"), "divides 8 KV heads, got 3"),
        (("--devices", "0"), "expected 1 to 8 Gaudi 3 devices, got 0"),
        (("--attention", "triton"), "attention that an HPU runs, reference or hpu, got 'triton'"),
        (("--dtype", "int3"), "expected the format bf16, fp8, int8 or int4, got 'int3'"),
        (("--kv-cache-dtype", "bf16", "fp4"), "expected kv_cache_dtype to be one of auto, "),
        (("--sparsity", "0.5", "1.5"), "expected sparsity in [0, 1], got 1.5"),
        (("--context", "1000", "200000"), "expected contexts of 1 to 131072 tokens"),
        (("--context", "0"), "expected contexts of 1 token or more"),
        (("--recent", "0"), "recent >= 1"),
        (("--device-memory-utilization", "1.5"), "expected device_memory_utilization in (0, 1], got 1.5"),
        (("--model", "/no/such/place"), "expected config.json or a directory with it"),
        (("--png", "picture.jpg"), "ends in .png"),
        (("--png", "/no/such/place/a.png"), "/no/such/place does not exist"),
    ],
)
def test_bad_input_is_one_sentence(hpu_duo: Run, arguments: tuple[str, ...], complaint: str) -> None:
    result = hpu_duo(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert result.stderr.startswith("hpu-duo: error: ")
    assert not result.stdout


def test_a_word_that_belongs_to_no_option_is_refused(hpu_duo: Run) -> None:
    result = hpu_duo("--hardware", "gaudi3", "gaudi2")
    assert result.exit_code == 2
    assert "unexpected extra argument" in result.stderr


def test_the_parts_of_the_report_can_be_used_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    serving = Serving(GAUDI2)
    print_report(tiny(), serving, [capacity(tiny(), serving, 0.5, PLAIN, (100,))])
    assert "tiny on 1 x Gaudi 2" in capsys.readouterr().out
    assert hardware_table(GAUDI3).row_count == 4


def test_devices_may_share_the_tokens_of_retrieval_heads(hpu_duo: Run) -> None:
    eight = ("--devices", "8", "--sparsity", "0.5", "--context", "131072", "--kv-cache-dtype", "bf16")
    by_heads, by_context = (
        json.loads(hpu_duo(*eight, "--retrieval-parallel", choice, "--json").stdout)
        for choice in ("heads", "context")
    )
    assert by_context["serving"]["retrieval_parallel"] == "context"
    [heads], [context] = by_heads["capacities"], by_context["capacities"]
    # By heads a card with one key/value head keeps all of it where the layer retrieves at all.
    assert context["points"][0]["num_requests"] > heads["points"][0]["num_requests"]
    shown = hpu_duo(*eight, "--retrieval-parallel", "context")
    assert "8 x Gaudi 3, which share the tokens of retrieval heads" in shown.stdout
    [left_open] = json.loads(hpu_duo(*eight, "--json").stdout)["capacities"]
    assert left_open["points"] == context["points"]
    told = "8 ranks, 8 KV heads: retrieval heads are shared by context, 0 promoted"
    assert told in left_open["choice"]
    assert told in " ".join(hpu_duo(*eight).stdout.split())
    warned = " ".join(hpu_duo(*eight, "--retrieval-parallel", "heads").stdout.split())
    assert f"{heads['num_promoted']:,} promoted heads take " in warned
    assert (heads["promoted_bytes"], context["promoted_bytes"]) == (
        heads["points"][0]["bytes_per_request"] - context["points"][0]["bytes_per_request"],
        0,
    )
    refused = hpu_duo("--retrieval-parallel", "tokens")
    assert refused.exit_code == 2
    assert "heads, context, auto, got 'tokens'" in refused.stderr


def test_drafts_pay_from_the_tokens_that_a_verifying_step_costs(config_dir: Path) -> None:
    words = ["capacity", "--model", str(config_dir), "--context", "8192", "--sparsity", "0.5", "--json"]
    plain, drafting = (
        json.loads(CliRunner().invoke(app, [*words, *more]).output)
        for more in ([], ["--speculative-config", '{"num_speculative_tokens": 8}'])
    )
    assert "drafts_pay_from" not in plain
    evens = drafting["drafts_pay_from"]
    assert [each["num_rows"] for each in evens[:2]] == [1, plain["capacities"][0]["points"][0]["num_running"]]
    for each in evens:
        assert 1 <= each["tokens"]["4"] <= each["tokens"]["9"] < 9
    # Speeds are those of plain decodes; rings have 8 slots more, and tables buckets of longer rows.
    for one, other in zip(plain["capacities"], drafting["capacities"], strict=True):
        alone = one["points"][0]["tokens_per_s_alone"]
        assert other["points"][0]["tokens_per_s_alone"] == pytest.approx(alone, rel=1e-4)
        assert other["points"][0]["bytes_per_request"] > one["points"][0]["bytes_per_request"]
        assert other["graph_memory"]["num_graphs"] > one["graph_memory"]["num_graphs"]


def drafting_report(model: Path, method: dict[str, Any], *more: str) -> tuple[dict, dict]:
    """The reports with drafts of text, and with those of a method."""
    words = ["capacity", "--model", str(model), "--context", "4096", "--sparsity", "0", "--json", *more]
    found = []
    for one in ({}, method):
        given = json.dumps({"num_speculative_tokens": 4, "draft_lens": [1, 5], **one})
        found.append(json.loads(CliRunner().invoke(app, [*words, "--speculative-config", given]).output))
    return found[0], found[1]


def test_a_model_that_drafts_takes_memory_and_time(config_dir: Path) -> None:
    drafts = {"method": "draft_model", "model": str(config_dir)}
    text, drafting = drafting_report(config_dir, drafts, "--devices", "2")
    assert drafting["serving"]["draft"] == config_dir.name
    # Each device has all of the weights and of the keys of the model that drafts.
    missing = text["kv_cache_bytes"] - drafting["kv_cache_bytes"]
    assert missing > 1.7 * text["model"]["weight_bytes"]
    one, other = text["capacities"][0], drafting["capacities"][0]
    assert other["points"][0]["bytes_per_request"] == 3 * one["points"][0]["bytes_per_request"]
    assert other["graph_memory"]["num_graphs"] > 2 * one["graph_memory"]["num_graphs"]
    assert other["graph_memory"]["kept_bytes"] > 1.5 * one["graph_memory"]["kept_bytes"]
    needed = [report["drafts_pay_from"][0]["tokens"]["5"] for report in (text, drafting)]
    assert needed[1] > needed[0] + 5


@pytest.mark.skipif(VERSION < (5, 24), reason="MtpModel needs transformers 5.24")
def test_a_layer_that_drafts_takes_memory_and_time(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "n_routed_experts": 16, "vocab_size": 32_000}
    text, drafting = drafting_report(config_of(tmp_path, num_hidden_layers=8, **sizes), {"method": "mtp"})
    one, other = text["capacities"][0], drafting["capacities"][0]
    stored = [each["points"][0]["bytes_per_request"] for each in (one, other)]
    assert stored[1] == pytest.approx(stored[0] * 9 / 8)
    assert 0 < text["kv_cache_bytes"] - drafting["kv_cache_bytes"] < text["model"]["weight_bytes"] / 6
    needed = [report["drafts_pay_from"][0]["tokens"]["5"] for report in (text, drafting)]
    assert needed[0] < needed[1] < needed[0] + 2
    with pytest.raises(ValueError, match="needs a checkpoint with a layer of multi-token prediction"):
        read_mtp_layers(config_of(tmp_path / "none", num_mtp_layers=0), 1)


def config_of(directory: Path, **fields: int) -> Path:
    make_config("Glm4MoeConfig", **fields).save_pretrained(directory)
    return directory


def test_a_model_that_drafts_is_not_left_out_of_plans_in_silence(config_dir: Path) -> None:
    other = json.dumps({"method": "draft_model", "model": str(config_dir)})
    words = ["plan", "--model", str(config_dir), "--hardware", "gaudi3", "--speculative-config", other]
    refused = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert "planned without a model that drafts over stores of its own" in " ".join(refused.stderr.split())


def test_drafts_of_the_model_itself_pay_where_keys_outweigh_weights(config_dir: Path) -> None:
    given = '{"method": "duo", "num_speculative_tokens": 4, "draft_lens": [1, 5]}'
    words = ["capacity", "--model", str(config_dir), "--sparsity", "0", "--speculative-config", given]
    contexts = ["--context", "4096", "--context", "65536"]
    found = json.loads(CliRunner().invoke(app, [*words, *contexts, "--json"]).output)["drafts_pay_from"]
    of_text = given.replace("duo", "suffix")
    reports = [
        json.loads(CliRunner().invoke(app, [*words[:-1], each, "--json"]).output) for each in (given, of_text)
    ]
    memories = [report["capacities"][0]["graph_memory"] for report in reports]
    # A graph of drafts for each number of rows.
    assert 0 < memories[0]["num_graphs"] - memories[1]["num_graphs"] < memories[1]["num_graphs"] / 2
    assert memories[0]["kept_bytes"] > memories[1]["kept_bytes"]
    needed = {(each["context"], each["num_rows"]): each["tokens"]["5"] for each in found}
    assert needed[65536, 1] < needed[4096, 1]
    printed = " ".join(CliRunner().invoke(app, [*words, *contexts]).output.split())
    loses = needed[4096, 1] > sum(0.8**number for number in range(5))
    assert (
        "with 1 requests of 4,096 tokens and 0% streaming, drafts are predicted to lose" in printed
    ) is loses


def test_heads_that_retrieve_in_drafts_take_time_and_graphs(config_dir: Path) -> None:
    """The sparser, the fewer tokens have to be accepted; a graph for each bucket of longer rows."""
    of_window, *others = (
        drafting_report(config_dir, {"method": "duo", **more})[1]
        for more in ({}, {"draft_sparsity": 0.75}, {"draft_sparsity": 0.0})
    )
    needed = [each["drafts_pay_from"][-1]["tokens"]["5"] for each in (of_window, *others)]
    assert needed[0] < needed[1] < needed[2]
    graphs = [each["capacities"][0]["graph_memory"]["num_graphs"] for each in (of_window, *others)]
    assert graphs[0] < graphs[1] == graphs[2]


def test_capacity_has_the_host_and_the_disk(hpu_duo: Run) -> None:
    result = hpu_duo(
        *("--sparsity", "0", "--context", "512", "--json", "--link", "1GB/s"),
        *("--kv-offloading-size", "1", "--kv-offloading-disk-size", "2", "--disk-rate", "500MB/s"),
        *("--answer-tokens", "32"),
    )
    assert result.exit_code == 0, result.stderr
    one = json.loads(result.stdout)["capacities"][0]
    [host], [disk] = one["host"], one["disk"]
    num_bytes = one["points"][0]["bytes_per_request"]
    assert host["num_tokens"] == 2**30 // num_bytes * 512
    assert disk["num_requests"] == 2 * 2**30 // num_bytes
    assert host["seconds_back"] == pytest.approx(num_bytes / 1e9)
    assert disk["seconds_back"] == pytest.approx(num_bytes * 3 / 1e9)
    assert (host["binds"], disk["binds"]) == ("link", "disk")
    # Answers of 32 tokens: many requests share the slowest part of the way.
    [point] = one["points"]
    assert host["tokens_per_s"] == pytest.approx(32 / (num_bytes / 1e9))
    assert disk["tokens_per_s"] == pytest.approx(32 / (num_bytes / 5e8))
    assert (host["tokens_per_s_bound_by"], disk["tokens_per_s_bound_by"]) == ("link", "disk")
    computing = point["first_token_s"] + 32 / point["tokens_per_s"]
    assert host["tokens_per_s_computed"] == pytest.approx(32 / computing)


@pytest.mark.parametrize(
    ("num_running", "expected"),
    # Ten contexts of 1 MB pass in a second, decodes take 1 s for 100 tokens; alone both add up.
    [(1, (32 / (0.1 + 0.32), "link")), (2, (50.0, "device")), (40, (97.5, "device")), (None, None)],
)
def test_tokens_with_contexts_that_come_back(
    num_running: int | None, expected: tuple[float, str] | None
) -> None:
    tier = Tier("host", 10**9, 1e-7, 1e-7, "link", answer=32)
    rate = None if num_running is None else 100.0
    point = CapacityPoint(512, num_running or 0, 10**6, num_running or 0, rate, rate, 0.5)
    assert tier.tokens_per_s(point) == (expected and (pytest.approx(expected[0]), expected[1]))


def test_capacity_has_weights_on_the_host_and_the_disk(hpu_duo: Run) -> None:
    words = "--sparsity", "0", "--kv-cache-dtype", "bf16", "--context", "512", "--link", "1MB/s"
    policy = "--offload-policy", "0,50,100,0,100,0"
    reports = [json.loads(hpu_duo(*words, *each, "--json").stdout) for each in ((), policy)]
    plain, away = (report["model"]["weight_bytes_of"] for report in reports)
    # Of 32 layers, two pass through buffers.
    layers = (plain["device"] - away["device"]) * 32 / 30
    assert plain["host"] == plain["disk"] == 0
    assert away["host"] == pytest.approx(layers / 2)
    assert away["disk"] == pytest.approx(layers / 2)
    assert reports[1]["kv_cache_bytes"] > reports[0]["kv_cache_bytes"]
    [slow] = reports[1]["capacities"][0]["points"]
    # All layers pass through the link in each step.
    assert 1 / slow["tokens_per_s_alone"] == pytest.approx(layers / 1e6, rel=1e-3)
    # Of five layers, three of which lie on the host, four share two buffers, and one stays in its own.
    few, link = "--offload-policy=84.4,9.4,100,0,100,0", f"{layers / 32 / 1e6}MB/s"
    [point] = json.loads(hpu_duo(*words[:-1], link, few, "--json").stdout)["capacities"][0]["points"]
    assert 1 / point["tokens_per_s_alone"] == pytest.approx(4, rel=1e-2)
    printed = hpu_duo(*words, *policy).stdout
    assert "weights on" in printed
    assert "this version does not run weights on the host or a disk on HPU" in " ".join(printed.split())
    for option, value, message in (
        ("--offload-policy", "50,50,50,50,100,0", "of weights only"),
        ("--offload-policy", "auto", "which hpu-duo plan-offload finds, got 'auto'"),
        ("--cpu-offload-gb", "1000", "the GiB of all layers, got 1e+03"),
    ):
        assert message in " ".join(hpu_duo(*words, option, value).stderr.split())

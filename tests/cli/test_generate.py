"""``hpu-duo generate``: what it prints where, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import Result

from graphs import RecompileError
from hpu_duo.cli.text import offline
from hpu_duo.generation.offline import OfflineBatch, OfflineResult

Run = Callable[..., Result]


def transformers_text(
    model_dir: Path, tokenizer: PreTrainedTokenizerFast, prompt: str, num_tokens: int
) -> str:
    model: Any = LlamaForCausalLM.from_pretrained(model_dir)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    out = model.generate(ids, max_new_tokens=num_tokens, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_one_prompt_streams_its_text_to_stdout_and_the_table_to_stderr(
    hpu_duo: Run, model_dir: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    result = hpu_duo("generate", "--model", model_dir, "--prompt", "Once upon", "--max-new-tokens", "8")
    assert result.exit_code == 0, result.stderr
    expected = transformers_text(model_dir, tokenizer, "Once upon", 8)
    assert result.stdout.rstrip("\n") == expected.rstrip("\n")
    for row in ("prefill", "decode", "steps", "padding", "KV at peak"):
        assert row in result.stderr
    assert result.stderr.startswith("hpu-duo: cpu, ")
    assert "; weights float32, KV float32, arithmetic float32\n" in result.stderr
    assert "c-- x 1" in result.stderr
    assert "in whole blocks and rings" in result.stderr, "no percentage of so few tokens"


def test_several_prompts_are_labelled_in_the_order_given(
    hpu_duo: Run, model_dir: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("from a file", encoding="utf-8")
    result = hpu_duo(
        *("generate", "--model", model_dir, "--max-new-tokens", "6"),
        *("--file", "-", "--file", tmp_path / "prompt.txt", "--prompt", "first", "--prompt", "second"),
        stdin=b"from standard input",
    )
    assert result.exit_code == 0, result.stderr
    prompts = ["first", "second", "from standard input", "from a file"]
    labels = [line for line in result.stdout.split("\n") if line.startswith("--- prompt ")]
    assert labels == [f"--- prompt {n} of 4 (length): {text}" for n, text in enumerate(prompts, start=1)]
    for prompt in prompts:
        assert transformers_text(model_dir, tokenizer, prompt, 6) in result.stdout


def test_json_holds_texts_tokens_and_exact_counts(hpu_duo: Run, model_dir: Path) -> None:
    result = hpu_duo(
        *("generate", "--model", model_dir, "--prompt", "x" * 100, "--prompt", "y" * 7, "--json"),
        *("--max-new-tokens", "5", "--ignore-eos", "--max-num-batched-tokens", "32", "--block-size", "16"),
    )
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert [one["num_prompt_tokens"] for one in told["completions"]] == [100, 7]
    assert [len(one["token_ids"]) for one in told["completions"]] == [5, 5]
    assert {one["finish_reason"] for one in told["completions"]} == {"length"}
    run = told["run"]
    assert run["prefill"]["num_tokens"] == 107
    assert run["stats"]["num_output_tokens"] == 10
    assert run["stats"]["num_steps"] == sum(run["stats"]["steps"].values())
    assert run["kv_ratio"] >= 1.0, "without streaming heads whole blocks are at least the tokens in them"


def test_a_pattern_lowers_the_bytes_held(hpu_duo: Run, model_dir: Path, pattern_dir: Path) -> None:
    result = hpu_duo(
        *("generate", "--model", model_dir, "--prompt", "z" * 1000, "--max-new-tokens", "4", "--json"),
        *("--pattern", pattern_dir, "--sparsity", "0.5", "--block-size", "16"),
    )
    assert result.exit_code == 0, result.stderr
    ratio = json.loads(result.stdout)["run"]["kv_ratio"]
    blocks, ring, tokens = 63 * 16, 16, 1003
    assert ratio == pytest.approx((blocks + ring) / (2 * tokens), rel=1e-2)


def test_sampled_text_depends_on_the_seed_alone(hpu_duo: Run, model_dir: Path) -> None:
    def sample(seed: int) -> str:
        sampling = ("--temperature", "1.5", "--top-k", "100", "--top_p", "0.99", "--seed", str(seed))
        return hpu_duo("generate", "--model", model_dir, "--prompt", "a", *sampling).stdout

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_output_ends_before_a_stop_text(hpu_duo: Run, model_dir: Path) -> None:
    common = ("generate", "--model", model_dir, "--prompt", "q", "--max-new-tokens", "12")
    whole = hpu_duo(*common).stdout.removesuffix("\n")
    stop = whole[5]
    assert hpu_duo(*common, "--stop", stop).stdout.removesuffix("\n") == whole.split(stop)[0]


def test_chat_wraps_the_prompt_in_the_models_template(
    hpu_duo: Run, model_dir: Path, chat_model_dir: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    result = hpu_duo(
        "generate", "--model", chat_model_dir, "--chat", "--prompt", "Hi", "--max-new-tokens", "6"
    )
    assert result.exit_code == 0, result.stderr
    wrapped = "<user>Hi<assistant>"
    assert result.stdout.rstrip("\n") == transformers_text(model_dir, tokenizer, wrapped, 6).rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a prompt"),
        (["--prompt", "a", "--prompt", ""], "expected text in prompt 2, got none"),
        (["--file", os.devnull], f"expected text in the prompt file '{os.devnull}', got none"),
        (["--file", "-", "--file", "-"], "at most once"),
        (["--file", "no-such-file.txt"], "cannot read the prompt file 'no-such-file.txt'"),
        (["--prompt", "x" * 5000], "has 5000 prompt tokens"),
        (["--prompt", "x", "--chat"], "with a chat template"),
        (["--prompt", "x", "--max-new-tokens", "0"], "expected --max-new-tokens of 1 or more, got 0"),
        (["--prompt", "x", "--temperature", "-1"], "temperature: expected a number in [0, "),
        (["--prompt", "x", "--temperature", "1", "--top-p", "0"], "top_p: expected a number in (0, 1]"),
        (["--prompt", "x", "--top-k", "5"], "expected --temperature above 0 with --top-k"),
        (["--prompt", "x", "--sparsity", "0.5"], "sparsity needs a head pattern"),
        (
            ["--prompt", "x", "--device", "tpu"],
            "expected device 'auto' or one of cpu, cuda, hpu, hpu-sim, got 'tpu'",
        ),
        (["--prompt", "x", "--dtype", "int3"], "expected dtype 'auto' or one of"),
        (["--prompt", "x", "--graphs", "magic"], "expected a capture backend"),
        (["--prompt", "x", "--attention", "magic"], "expected attention to be one of"),
        (["--prompt", "x", "--block-size", "0"], "expected block_size to be an integer >= 1"),
        (["--prompt", "x", "--max-num-seqs", "0"], "expected max_num_seqs to be an integer >= 1"),
        (["--prompt", "x", "--kv-cache-bytes", "4G"], "expected a size in bytes such as 4GiB"),
        (["--prompt", "x", "--kv-cache-bytes", "1KiB"], "the KV cache needs at least"),
        (["--prompt", "x", "--kv-cache-bytes", "1GiB", "--num-blocks", "4"], "got both"),
        (["--prompt", "x", "--max-model-len", "999999"], "expected max_model_len of at most 4096"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    hpu_duo: Run, model_dir: Path, arguments: list[str], message: str
) -> None:
    result = hpu_duo("generate", "--model", model_dir, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("hpu-duo: error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sparsity", "1.5"], "expected sparsity in [0, 1], got 1.5"),
        (["--sparsity", "0.5", "--threshold", "0.5"], "expected sparsity or threshold, got both"),
        ([], "needs sparsity or threshold, got neither"),
        (["--sparsity", "0.5", "--recent", "0"], "expected recent to be an integer >= 1"),
    ],
)
def test_a_bad_choice_of_heads_is_refused(
    hpu_duo: Run, model_dir: Path, pattern_dir: Path, arguments: list[str], message: str
) -> None:
    result = hpu_duo("generate", "--model", model_dir, "--prompt", "x", "--pattern", pattern_dir, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_missing_files_are_named(hpu_duo: Run, model_dir: Path, tmp_path: Path) -> None:
    no_model = hpu_duo("generate", "--model", tmp_path / "nothing", "--prompt", "x")
    assert (no_model.exit_code, "expected a directory" in no_model.stderr) == (2, True)
    no_pattern = hpu_duo(
        *("generate", "--model", model_dir, "--prompt", "x"),
        *("--pattern", tmp_path, "--sparsity", "0.5"),
    )
    assert (no_pattern.exit_code, "full_attention_heads.tsv" in no_pattern.stderr) == (2, True)


def test_text_that_is_not_utf8_is_refused(hpu_duo: Run, model_dir: Path) -> None:
    result = hpu_duo("generate", "--model", model_dir, "--file", "-", stdin=b"ab\xff")
    assert result.exit_code == 2
    assert "expected UTF-8 text in '-', got byte 0xff" in result.stderr


def test_unknown_options_exit_with_2(hpu_duo: Run) -> None:
    assert hpu_duo("generate", "--no-such-option").exit_code == 2


@pytest.mark.slow
def test_ctrl_c_keeps_the_text_and_the_table_and_leaves_no_traceback(model_dir: Path) -> None:
    command = [sys.executable, "-m", "hpu_duo.cli", "generate", "--model", str(model_dir), "--ignore-eos"]
    process = subprocess.Popen(
        [*command, "--prompt", "run", "--max-new-tokens", "4000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # A shell that runs the tests in the background lets its children ignore the signal.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert first
    assert rest.endswith(b"\n")
    assert b"decode" in errors
    assert b"Traceback" not in errors


def test_offline_writes_a_line_for_each_prompt_and_goes_on_behind_bad_ones(
    hpu_duo: Run, model_dir: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lines = [
        json.dumps({"id": "a", "prompt": "Once upon", "max_tokens": 5}),
        "{no json",
        json.dumps({"prompt": [9, 8, 7]}),
        json.dumps({"prompt": "x", "temperature": -1}),
        json.dumps({"prompt": [10**6]}),
        json.dumps({"prompt": "x", "top": 1}),
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "in.txt").write_text("first\n\nsecond\n", encoding="utf-8")
    result = hpu_duo(
        *("generate", "--offline", "--model", model_dir, "--max-new-tokens", "6", "--prompt", "told"),
        *("--prompts", tmp_path / "in.jsonl", "--prompts", tmp_path / "in.txt"),
        *("--output", tmp_path / "out.jsonl"),
    )
    assert result.exit_code == 1
    assert "5 of 9 prompts" not in result.stdout == ""
    assert "5 of 9 prompts" in result.stderr
    told = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert [one["index"] for one in told] == list(range(9))
    assert [one["id"] for one in told][:3] == [None, "a", None]
    texts = {0: ("told", 6), 1: ("Once upon", 5), 7: ("first", 6), 8: ("second", 6)}
    for place, (prompt, length) in texts.items():
        assert told[place]["text"] == transformers_text(model_dir, tokenizer, prompt, length)
        assert told[place]["finish_reason"] == "length"
    assert len(told[3]["token_ids"]) == 6
    for place, message in (
        (2, "line 2"),
        (4, f"{tmp_path / 'in.jsonl'}, line 4: temperature"),
        (5, "prompts[5] has prompt tokens"),
        (6, "got 'top'"),
    ):
        assert message in told[place]["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--output", "x", "--prompt", "a"), "expected --output with --offline"),
        (("--offline", "--json", "--prompt", "a"), "expected --json without --offline"),
        (("--offline", "--context", "x", "--prompt", "a"), "expected --context without --offline"),
        (("--offline", "--prompts", os.devnull), "expected a prompt"),
    ],
)
def test_offline_refuses_what_it_does_not_do(hpu_duo: Run, options: tuple[str, ...], message: str) -> None:
    result = hpu_duo("generate", *options)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (RecompileError("a new shape"), 2), (RuntimeError("out of memory"), 1)],
)
def test_an_offline_run_that_ends_early_writes_what_has_ended(
    hpu_duo: Run, model_dir: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    run = OfflineBatch.run

    def interrupted(self: OfflineBatch, on_result: Any = None) -> Any:
        def put(result: OfflineResult) -> None:
            on_result(result)
            raise error

        return run(self, put)

    monkeypatch.setattr(OfflineBatch, "run", interrupted)
    prompts = ("--prompt", "ab", "--prompt", "cd")
    result = hpu_duo("generate", "--offline", "--model", model_dir, "--max-new-tokens", "3", *prompts)
    assert result.exit_code == code
    [told] = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(told["token_ids"]) == 3
    assert "1 of 2 prompts" in result.stderr


def test_offline_writes_lines_in_order_as_they_complete(
    hpu_duo: Run, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, written = tmp_path / "out.jsonl", list[list[int]]()

    def run(self: OfflineBatch, on_result: Any = None) -> None:
        for index in (1, 0, 2):
            on_result(OfflineResult(index, ()))
            written.append([json.loads(line)["index"] for line in output.read_text("utf-8").splitlines()])

    monkeypatch.setattr(OfflineBatch, "run", run)
    prompts = (each for text in "abc" for each in ("--prompt", text))
    hpu_duo("generate", "--offline", "--model", model_dir, "--output", output, *prompts)
    assert written == [[], [0, 1], [0, 1, 2]]


def test_offline_reads_and_writes_any_characters(hpu_duo: Run, model_dir: Path, tmp_path: Path) -> None:
    lines = ['{"id": "\\ud800", "prompt": "a\u2028b"}', '{"prompt": "\\ud800"}']
    (tmp_path / "in.jsonl").write_bytes("\r\n".join(lines).encode())
    result = hpu_duo(
        *("generate", "--offline", "--model", model_dir, "--max-new-tokens", "3"),
        *("--prompts", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"),
    )
    assert result.exit_code == 1, result.output
    good, bad = map(json.loads, (tmp_path / "out.jsonl").read_text("utf-8").splitlines())
    assert (good["id"], good["num_prompt_tokens"], good["error"]) == ("\ud800", 3, None)
    assert f"{tmp_path / 'in.jsonl'}, line 2: " in bad["error"]


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ((), "auto"),
        (("--offload-num-batches", "2"), None),
        (("--cpu-offload-gb", "1"), None),
        (("--tensor-parallel-size", "2"), None),
        (("--offload-policy", "0,100,100,0,100,0"), "0,100,100,0,100,0"),
    ],
)
def test_offline_places_weights_by_the_search_without_other_placement(
    hpu_duo: Run, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], policy: str | None
) -> None:
    loaded = list[Any]()

    def load(path: Path | None, settings: Any, *_: Any) -> None:
        loaded.append(settings.get("offload_policy"))
        raise ValueError("not loaded here")

    monkeypatch.setattr(offline, "load_model", load)
    assert hpu_duo("generate", "--offline", "--prompt", "a", *options).exit_code == 2
    assert loaded == [policy]

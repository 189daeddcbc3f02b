"""Calibration from checkpoint and prompts to a plan, and the plan in an engine."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR
from hpu_duo.config.kv_plan import Keep, KVPlan
from hpu_duo.lab.identify import Form
from hpu_duo.lab.kv_calibration import (
    AdaKV,
    CalibratedPlan,
    Calibration,
    CalibrationMethod,
    CalibrationRequest,
    Documents,
    FastGen,
    PromptFile,
)

WithTokenizer = Callable[[str], Path]
SHORT = Documents(num_prompts=2, num_tokens=400, num_passkeys=3, passkey_words=4, form=Form.NAMES)
METHODS = [AdaKV(), AdaKV(64, policy="h2o", safeguard=0.0), FastGen(0.9), FastGen(0.5, queries=32)]


def run(request: CalibrationRequest) -> CalibratedPlan:
    calibration = Calibration(request)
    assert [progress.done for progress in calibration.run()] == [*range(1, calibration.total + 1)]
    return calibration.result()


def built_in(
    method: CalibrationMethod, prompts: PromptFile | Documents = SHORT, num_sizes: int = 4
) -> CalibratedPlan:
    return run(CalibrationRequest(MODEL_DIR, method, prompts, num_sizes, dtype="float32", device="cpu"))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_an_engine_holds_what_the_plan_says(tmp_path: Path, method: CalibrationMethod) -> None:
    found = built_in(method, num_sizes=3)
    found.plan.save(tmp_path / "plan.yaml", ["# from\nhere"])
    assert KVPlan.load(tmp_path / "plan.yaml") == found.plan
    model = HPUDuoModel.from_pretrained(
        MODEL_DIR, kv_plan=tmp_path / "plan.yaml", max_model_len=1024, max_num_seqs=2, device="cpu"
    )
    held: dict[int, int] = {}
    for budget in model.stats().budgets:
        held[budget.num_slots] = held.get(budget.num_slots, 0) + budget.num_heads
    assert held == found.heads_by_size
    assert 1 <= len(held) <= 3
    per_head = {each.num_slots: each.bytes_per_request // each.num_heads for each in model.stats().budgets}
    # Keys and values of 64 numbers in bfloat16, a position and a score.
    assert per_head == {size: size * (2 * 64 * 2 + 8) for size in held}
    ids = model.tokenizer("The passkey for Ada is walrus. " * 40)["input_ids"]
    assert len(ids) > min(held)
    output = model.generate([ids], max_new_tokens=4, ignore_eos=True)
    assert len(output[0]) == len(ids) + 4


def test_ada_kv_shares_out_what_was_asked_for_and_rounding_is_told() -> None:
    exact, rounded = built_in(AdaKV(0.2), num_sizes=100), built_in(AdaKV(0.2), num_sizes=2)
    lengths = Calibration(CalibrationRequest(MODEL_DIR, AdaKV(0.2), SHORT, device="cpu")).lengths
    budget = -(-max(lengths) // 5)
    for heads in exact.layers:
        assert sum(head.num_asked or 0 for head in heads) == budget * 4
    assert exact.num_asked == exact.num_kept == rounded.num_asked == budget * 16
    assert rounded.num_kept > rounded.num_asked
    assert len(rounded.heads_by_size) == 2
    for one, other in zip(sum(exact.layers, ()), sum(rounded.layers, ())):
        assert one.num_asked == other.num_asked <= (other.keep.budget or 0)
        assert (one.recovered or 0) <= (other.recovered or 0) <= 1 + 1e-9


def test_more_of_the_attention_costs_more_tokens() -> None:
    few, many = built_in(FastGen(0.5)), built_in(FastGen(0.99))
    for one, other in zip(sum(few.layers, ()), sum(many.layers, ())):
        assert (one.recovered or 0) >= 0.5
        assert (other.recovered or 0) >= 0.99
        assert other.num_asked is None or (one.num_asked or 0) <= other.num_asked
    assert all(head.keep == Keep() for heads in built_in(FastGen(1.0, heavy=0.01)).layers for head in heads)


@pytest.mark.parametrize("name", ["gemma2", "qwen2_partly_sliding"])
@pytest.mark.parametrize("method", [AdaKV(20, "h2o"), FastGen()], ids=str)
def test_layers_with_a_window_keep_it(
    with_tokenizer: WithTokenizer, tmp_path: Path, name: str, method: CalibrationMethod
) -> None:
    directory = with_tokenizer(name)
    write(tmp_path / "prompts.jsonl", ["a b, c. " * 8, "hello there, who are you? " * 2])
    request = CalibrationRequest(directory, method, PromptFile(tmp_path / "prompts.jsonl"), device="cpu")
    found = run(request)
    kinds = [{head.kind for head in heads} for heads in found.layers]
    has_window = [True, False] * 2 if name == "gemma2" else [False, False, True, True]
    assert [kind == {"window of 11"} for kind in kinds] == has_window
    for heads, windowed in zip(found.layers, has_window):
        assert all((head.recovered is None) == windowed for head in heads)
        assert not windowed or all(head.keep == Keep() for head in heads)
    model = HPUDuoModel.from_pretrained(directory, kv_plan=found.plan, max_model_len=128, max_num_seqs=2)
    assert {each.num_slots: each.num_heads for each in model.stats().budgets} == found.heads_by_size


def write(file: Path, prompts: list[str]) -> None:
    file.write_text("\n".join(json.dumps({"prompt": text, "n": 1}) for text in prompts), encoding="utf-8")


def test_a_model_of_windows_only_is_refused(with_tokenizer: WithTokenizer, tmp_path: Path) -> None:
    write(tmp_path / "prompts.jsonl", ["a b c d e f g " * 5])
    prompts = PromptFile(tmp_path / "prompts.jsonl")
    with pytest.raises(
        ValueError, match="expected a model with a layer that sees the whole text, got one whose 4"
    ):
        Calibration(CalibrationRequest(with_tokenizer("mistral_sliding"), FastGen(), prompts, device="cpu"))


@pytest.mark.parametrize(
    ("method", "prompts", "message"),
    [
        (AdaKV(1000), SHORT, "expected prompts of at least 1000 tokens to measure, got 4.. in document 0"),
        (AdaKV(0.05), SHORT, "expected a budget of at least 33 tokens for kv_policy 'snapkv', got 2."),
        (AdaKV(8, "snapkv:window=8"), SHORT, "a budget of at least 9 tokens"),
        (AdaKV(4, "expected-attention"), SHORT, "a budget of at least 5 tokens"),
        (FastGen(), Documents(num_tokens=9000), "at most 8192 tokens, the positions of the model"),
        (FastGen(), Documents(num_tokens=9000, num_passkeys=0), "a model of at least 900. positions"),
        (FastGen(), Documents(haystack=Path("none.txt")), "cannot read the haystack 'none.txt'"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(
    method: CalibrationMethod, prompts: Documents, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Calibration(CalibrationRequest(MODEL_DIR, method, prompts, device="cpu"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one or more prompts in"),
        ('{"prompt": "a b"}', "at most 8192 tokens, the positions of the model, got .* in line 2 of"),
        ("{", "expected a JSON object in line 1 of .*prompts.jsonl: "),
        ("[1]", r'expected {"prompt": TEXT} in line 1 of .*prompts.jsonl, got .\[1\]'),
        ('{"prompt": ""}', 'expected {"prompt": TEXT} in line 1'),
    ],
)
def test_files_that_hold_no_prompts_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text + "\n" + (json.dumps({"prompt": "walrus " * 9000}) if "a b" in text else ""))
    with pytest.raises(ValueError, match=message):
        Calibration(CalibrationRequest(MODEL_DIR, FastGen(), PromptFile(file), device="cpu"))


def test_files_are_read_as_far_as_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a b"}\n\n{"prompt": "c"}\nnonsense')
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    first, second = PromptFile(file, 2).read(tokenizer, None)
    assert first.ids.tolist() == list(tokenizer("a b")["input_ids"])
    assert (first.name, second.name) == (f"line 1 of {file}", f"line 3 of {file}")
    tokenizer.chat_template = "{% for each in messages %}x {{ each['content'] }}{% endfor %} y"
    (said,) = PromptFile(file, 1, is_chat=True).read(tokenizer, None)
    assert said.ids.tolist() == tokenizer("x a b y", add_special_tokens=False)["input_ids"]
    file.write_text('{"prompt": "a b"}')
    with pytest.raises(ValueError, match=r"expected 2 prompts in .*, got 1"):
        PromptFile(file, 2).read(tokenizer, None)
    with pytest.raises(ValueError, match="cannot read the prompts"):
        PromptFile(tmp_path / "none").read(tokenizer, None)
    file.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match=r"expected UTF-8 text in .*, got byte 0xff"):
        PromptFile(file).read(tokenizer, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdaKV(0), "expected a budget to be a share above 0"),
        (lambda: AdaKV(1.5), "or a whole number of tokens, got 1.5"),
        (lambda: AdaKV(safeguard=2), "expected a safeguard from 0 to 1, got 2"),
        (lambda: AdaKV(policy="local"), "chooses by attention, .* got 'local'"),
        (lambda: AdaKV(queries=0), "expected 1 query or more"),
        (lambda: FastGen(0), "expected threshold above 0 and up to 1, got 0"),
        (lambda: FastGen(window=1.1), "expected window above 0 and up to 1"),
        (lambda: FastGen(queries=0), "expected 1 query or more"),
        (lambda: Documents(num_prompts=0), "expected num_prompts >= 1"),
        (lambda: PromptFile(Path("a"), 0), "expected 1 prompt or more, got 0"),
        (lambda: CalibrationRequest(MODEL_DIR, num_sizes=0), "expected 1 size of budgets or more"),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

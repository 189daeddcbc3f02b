"""kvpress as a peer: what its process is asked and tells, what is refused, and the difference of two systems.

A small package stands in for kvpress at the border of its process; ``test_kvpress_real.py`` asks kvpress.
"""

import ast
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR
from hpu_duo.lab.eval import Subject
from hpu_duo.lab.eval.interval import wilson
from hpu_duo.lab.eval.kvpress_peer import (
    KVPressError,
    KVPressModel,
    KVPressProcess,
    Press,
    beside,
    comparison_table,
    press_of,
    worker,
)
from hpu_duo.lab.eval.kvpress_peer.comparison import difference
from hpu_duo.lab.eval.policy_curve import PolicyTask
from tests.tiers import further

STAND_IN = Path(__file__).parent / "stand_in"
EOS = (2,)
PROMPTS = [[1, *range(40, 40 + length)] for length in (61, 100, 83)]
CONTINUATIONS = [[[7, 8, 9, 10], [11]], [[60, 61, 62]], [[5, 6]]]
TOKEN_BYTES = 4 * 4 * 2 * 64 * 4
"""Layers, KV heads, keys and values, head dimension, float32."""


@pytest.fixture(scope="module")
def ours() -> Subject:
    return Subject(
        HPUDuoModel.from_pretrained(
            MODEL_DIR, dtype="float32", device="cpu", max_num_seqs=4, enable_prefix_caching=False
        )
    )


@pytest.fixture(scope="module")
def process() -> Iterator[KVPressProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(STAND_IN))
        with KVPressProcess(Path(sys.executable), MODEL_DIR, "float32") as found:
            yield found


@pytest.fixture(scope="module")
def kvpress(process: KVPressProcess, ours: Subject) -> Callable[..., KVPressModel]:
    """A model in the process, with a press or without."""

    def make(press: Press | None = None, kept: int = 0) -> KVPressModel:
        return KVPressModel(process, ours.tokenizer, ours.max_len, EOS, press, kept)

    return make


def test_full_attention_is_that_of_the_engine(ours: Subject, kvpress: Callable[..., KVPressModel]) -> None:
    theirs = kvpress()
    (wanted, kv), (found, found_kv) = (one.score(PROMPTS, CONTINUATIONS) for one in (ours, theirs))
    for each, found_each in zip(wanted, found, strict=True):
        for one, two in zip(each, found_each, strict=True):
            assert two.logprobs == pytest.approx(one.logprobs, abs=1e-4)
            assert two.is_likeliest == one.is_likeliest
    for own_kv, other_kv in zip(kv, found_kv, strict=True):
        assert [one.full for one in other_kv] == [one.full for one in own_kv]
        assert all(one.held == one.full for one in other_kv)
    ends = [[], [], [ours.encode(".")[-1]]]
    for num_decoded in (1, 7):
        answers = [
            one.answer(PROMPTS, [9, 1, 20], ends=ends, num_decoded=num_decoded)[0] for one in (ours, theirs)
        ]
        assert answers[0] == answers[1]
    assert theirs.spent.time_s > 0
    assert theirs.spent.cpu_s > 0


@pytest.mark.parametrize("kept", [6, 29, 60])
def test_a_prompt_is_cut_once_to_as_many_tokens_and_all_behind_it_stay(
    kvpress: Callable[..., KVPressModel], kept: int
) -> None:
    """The oracle is one pass of transformers under a mask."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL_DIR).float().eval()
    scores, kv = kvpress(Press("StreamingLLMPress", {"n_sink": 3}), kept).score(PROMPTS, CONTINUATIONS)
    for prompt, each, found, found_kv in zip(PROMPTS, CONTINUATIONS, scores, kv, strict=True):
        num_read = len(prompt) - 1
        for wanted, score, held in zip(each, found, found_kv, strict=True):
            ids = [*prompt, *wanted[:-1]]
            seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
            seen[num_read:, 3 : num_read - kept + 3] = False
            with torch.inference_mode():
                logits = model(torch.tensor([ids]), attention_mask=seen[None, None]).logits[0, num_read:]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(wanted)[:, None])[:, 0]
            assert score.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
            assert held.num_tokens == len(ids)
            assert (held.held, held.full) == ((kept + len(wanted)) * TOKEN_BYTES, len(ids) * TOKEN_BYTES)


def test_a_press_that_needs_weights_gets_them(kvpress: Callable[..., KVPressModel]) -> None:
    press = press_of("h2o")
    assert press is not None
    (_, kv), (texts, answered) = (
        kvpress(press, 20).score(PROMPTS, CONTINUATIONS),
        kvpress(press, 20).answer(PROMPTS, [3, 3, 3], num_decoded=4),
    )
    assert [one.held for one in kv[0]] == [24 * TOKEN_BYTES, 21 * TOKEN_BYTES]
    assert len(texts) == 3
    # What ends an answer is not written to the cache.
    assert all(24 * TOKEN_BYTES <= one.held <= 26 * TOKEN_BYTES for one in answered)


def test_a_prompt_that_is_no_longer_than_the_budget_is_not_cut(kvpress: Callable[..., KVPressModel]) -> None:
    model = kvpress(Press("TOVAPress"), 61)
    _, ((kv,),) = model.score([PROMPTS[0]], [[[7]]])
    assert kv.held == kv.full
    _, ((alone, again),) = kvpress(Press("TOVAPress"), 5).score([[1]], [[[7, 8], [7, 8]]])
    assert (alone.held, alone.num_tokens) == (2 * TOKEN_BYTES, 2)
    assert again == alone


def test_bytes_on_the_way_are_those_at_the_end_less_the_tokens_between(
    kvpress: Callable[..., KVPressModel],
) -> None:
    model = kvpress(Press("StreamingLLMPress", {"n_sink": 3}), 20)
    _, ((end, shorter),) = model.score([PROMPTS[0]], [[[7, 8, 9, 10], [7, 8]]])
    assert model.kv_before(end, shorter.num_tokens) == shorter


def test_tasks_are_measured_as_the_engine_measures_them(
    ours: Subject, kvpress: Callable[..., KVPressModel]
) -> None:
    task = PolicyTask(("passkey",), 400, 1, 2, 3, num_samples=1, ruler_tasks=("niah_single_1",))
    for name in ("passkey", "perplexity", "ruler"):
        own, other = task.measure(name, ours), task.measure(name, kvpress())
        assert other["value"] == pytest.approx(own["value"], rel=1e-3)
        assert other["num_answers"] == own["num_answers"]
        assert min(own["cpu_s"], other["cpu_s"]) > 0


def test_the_worker_imports_nothing_of_this_package() -> None:
    tree = ast.parse(Path(worker.__file__).read_text(encoding="utf-8"))
    named = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {name.partition(".")[0] for name in named} <= {
        *sys.stdlib_module_names,
        *("torch", "transformers", "kvpress"),
    }


def start(monkeypatch: pytest.MonkeyPatch, packages: Path, model: Path = MODEL_DIR) -> KVPressProcess:
    monkeypatch.setenv("PYTHONPATH", str(packages))
    return KVPressProcess(Path(sys.executable), model)


def test_a_program_that_is_not_there_or_lacks_kvpress_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KVPressError, match=r"expected a Python that has kvpress, got .*none: No such file"):
        KVPressProcess(tmp_path / "none", MODEL_DIR)
    (tmp_path / "kvpress.py").write_text("raise ImportError('none here')")
    with pytest.raises(KVPressError, match=r"-m pip install kvpress\), got .*: none here"):
        start(monkeypatch, tmp_path)


def test_a_model_that_the_other_transformers_does_not_know_is_told_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(MODEL_DIR, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "of-next-year"}))
    with pytest.raises(KVPressError, match=r"which has transformers \d.*model: ValueError: .*of-next-year"):
        start(monkeypatch, STAND_IN, model)


@pytest.mark.parametrize(
    ("press", "told"),
    [
        ("TOVAPress", "exit code 1; its last lines:\n(.*\n)*NotImplementedError: no such layers here"),
        *further(("SnapKVPress", "exit code 9; its last lines")),
    ],
)
def test_a_process_that_ends_is_told_with_its_last_lines(
    ours: Subject, monkeypatch: pytest.MonkeyPatch, press: str, told: str
) -> None:
    with start(monkeypatch, STAND_IN) as process:
        model = KVPressModel(process, ours.tokenizer, 100, EOS, Press(press), 5)
        with pytest.raises(KVPressError, match=told):
            model.score(PROMPTS, CONTINUATIONS)
        with pytest.raises(KVPressError, match=told):
            model.score(PROMPTS, CONTINUATIONS)


def test_policies_have_the_presses_with_their_options() -> None:
    assert press_of("h2o") == Press("ObservedAttentionPress", attention="eager")
    assert press_of("tova") == Press("TOVAPress")
    assert press_of("streaming-llm:sink=8") == Press("StreamingLLMPress", {"n_sink": 8})
    assert press_of("snapkv") == Press("SnapKVPress", {"window_size": 32, "kernel_size": 5})
    options = {"n_sink": 4, "n_future_positions": 64, "epsilon": 0.01}
    assert press_of("expected-attention:future=64,epsilon=0.01") == Press("ExpectedAttentionPress", options)
    for without in ("local", "fixed", "strided", "h2o:positions=cache", "streaming-llm:positions=cache"):
        assert press_of(without) is None
    with pytest.raises(ValueError, match="expected kv_policy to be one of"):
        press_of("duo")


def test_the_interval_of_a_difference_is_newcombes() -> None:
    """Example (a) of his paper, 56 of 70 and 48 of 80."""
    counts = ((56, 70), (48, 80))
    ours, theirs = ((exact / all_, *wilson(exact / all_, all_)) for exact, all_ in counts)
    assert difference(ours, theirs) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


@given(st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_a_difference_lies_in_its_interval_and_turns_with_the_sides(
    counts: tuple[int, int],
) -> None:
    one, other = ((exact / 40, *wilson(exact / 40, 40)) for exact in counts)
    middle, low, high = difference(one, other)
    assert low <= middle <= high
    assert difference(other, one) == pytest.approx((-middle, -high, -low))


def record(system: str, task: str, policy: str, value: float, low: float, high: float) -> dict[str, Any]:
    kv = {"kv_num_tokens": 10, "held_bytes": 5, "full_bytes": 10, "kv_num_texts": 1}
    spent = {"time_s": 2.0, "cpu_s": 1.0}
    key = {"system": system, "task": task, "policy": policy, "budget": 0.1, "num_answers": 4}
    return {**key, "value": value, "value_low": low, "value_high": high, **kv, **spent}


def test_rows_stand_beside_those_of_kvpress_and_say_where_ours_is_worse() -> None:
    rows = beside(
        [
            record("kvpress", "perplexity", "tova", 5.0, 4.5, 5.5),
            record("kvpress", "passkey", "tova", 0.9, 0.8, 0.95),
            record("hpu-duo, chunks", "perplexity", "tova", 4.0, 3.9, 4.1),
            record("hpu-duo, chunks", "passkey", "tova", 0.5, 0.4, 0.6),
            record("hpu-duo, whole", "passkey", "tova", 0.85, 0.75, 0.9),
            record("hpu-duo, chunks", "passkey", "local", 0.1, 0.0, 0.2),
        ]
    )
    told = [(row["task"], row["system"], row["policy"], row["is_worse"]) for row in rows]
    assert told == [
        ("passkey", "hpu-duo, chunks", "tova", True),
        ("passkey", "hpu-duo, whole", "tova", False),
        ("passkey", "hpu-duo, chunks", "local", None),
        ("perplexity", "hpu-duo, chunks", "tova", False),
    ]
    # Of perplexity, less is better.
    assert rows[3]["difference"] == pytest.approx(math.log(5.0 / 4.0))
    assert rows[3]["difference_low"] > 0
    table = comparison_table(rows)
    assert (
        "| 10% | tova | hpu-duo, chunks | 0.500 (0.40 to 0.60) | 50.0% | 1.0 | 0.900 (0.80 to 0.95)" in table
    )
    assert "### perplexity" in table

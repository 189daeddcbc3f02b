"""The adapter inside the real lm-evaluation-harness, on tasks written here, without a network."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.heads import HeadPattern
from hpu_duo.lab.eval import KVBytes
from hpu_duo.lab.tasks.passkeys import document, question, token_counter

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.tasks import TaskManager

    from hpu_duo.lab.eval.lm_eval_adapter import HPUDuoLM

# The harness takes 2 s to import, in every worker that collects this file.
pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval")

CHOICES = """
task: passkey_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
GENERATION = """
task: passkey_generation
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""
ROLLING = """
task: passkey_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: TEXT}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{short}}"
metric_list: [{metric: word_perplexity}]
"""


def adapter(**options: Any) -> HPUDuoLM:
    from hpu_duo.lab.eval.lm_eval_adapter import HPUDuoLM

    return HPUDuoLM(dtype="float32", batch_size=4, **options)


@pytest.fixture(scope="module")
def full() -> HPUDuoLM:
    return adapter()


@pytest.fixture(scope="module")
def duo() -> HPUDuoLM:
    return adapter(sparsity=0.5)


@pytest.fixture(scope="module")
def dropping() -> HPUDuoLM:
    """All heads stream: a needle that is not in sink or recent is gone from the cache."""
    return adapter(pattern=HeadPattern.all_streaming(4, 4, sink=16, recent=64))


@pytest.fixture(scope="module")
def questions() -> list[dict[str, Any]]:
    """Two questions about each of two documents, the needles far from both ends."""
    count = token_counter(AutoTokenizer.from_pretrained(MODEL_DIR))
    docs = []
    for seed in range(2):
        written = document(count, 300, 3, 4, seed=10_000 + seed, depths=[0.2, 0.3, 0.4])
        short = document(count, 48, 0, 1, seed=0).text
        for at in range(2):
            asked = written.passkeys[at]
            answers = [one.answer for one in written.passkeys]
            docs.append(
                {
                    "text": written.text + question(asked),
                    "choices": answers,
                    "label": at,
                    "answer": asked.answer.removesuffix("."),
                    "short": short,
                }
            )
    return docs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, questions: list[dict[str, Any]]) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    # One text is enough for perplexity.
    (folder / "text.jsonl").write_text(json.dumps(questions[0]) + "\n", encoding="utf-8")
    data.write_text("".join(json.dumps(one) + "\n" for one in questions), encoding="utf-8")
    for name, text in (("choice", CHOICES), ("generation", GENERATION), ("rolling", ROLLING)):
        (folder / f"{name}.yaml").write_text(
            text.replace("DATA", str(data)).replace("TEXT", str(folder / "text.jsonl")), encoding="utf-8"
        )
    return folder


@pytest.fixture(scope="module")
def tasks(folder: Path) -> TaskManager:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluate(model: Any, task: str, tasks: TaskManager, **arguments: Any) -> dict[str, float]:
    import lm_eval

    done = lm_eval.simple_evaluate(model, tasks=[task], task_manager=tasks, bootstrap_iters=0, **arguments)
    return {name.partition(",")[0]: value for name, value in done["results"][task].items()}


def instances(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def test_the_harness_finds_the_name_and_the_model_answers_by_choice(tasks: TaskManager) -> None:
    from hpu_duo.lab.eval.lm_eval_adapter import register

    register()
    found = evaluate("hpu-duo", "passkey_choice", tasks, model_args={"dtype": "float32", "sparsity": 0.5})
    assert found["acc"] == 1.0


@pytest.mark.slow
def test_the_other_models_of_the_harness_are_found_beside_this_one() -> None:
    """In a process of its own: what one import fills stays filled."""
    script = (
        "import hpu_duo.lab.eval.lm_eval_adapter\n"
        "from lm_eval.api.registry import MODEL_REGISTRY, get_model\n"
        "print('hf' in MODEL_REGISTRY, get_model('dummy').__name__, get_model('hpu-duo').__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "True DummyLM HPUDuoLM\n", done.stderr


@pytest.mark.slow
def test_bytes_of_each_task_are_in_the_report_of_the_harness(
    tasks: TaskManager, questions: list[dict[str, Any]]
) -> None:
    import lm_eval

    model = adapter(sparsity=0.5)  # makes the name known
    done = lm_eval.simple_evaluate(
        "hpu-duo",
        model_args={"dtype": "float32", "sparsity": 0.5},
        tasks=["passkey_choice", "passkey_generation", "passkey_rolling"],
        task_manager=tasks,
        bootstrap_iters=0,
    )
    rows = {row["task"]: row for row in done["config"]["kv_cache"]}
    count = model.subject.count
    choices = [
        model.subject.kv_bytes(1 + count(one["text"]) + count(choice) - 1)
        for one in questions
        for choice in one["choices"]
    ]
    wanted = KVBytes.total(choices)
    assert rows["passkey_choice"]["num_requests"] == len(choices) == 12
    assert rows["passkey_choice"]["held_bytes"] == wanted.held / 12
    assert rows["passkey_choice"]["kv_ratio"] == wanted.ratio
    # Answers end with their full stop.
    answered = KVBytes.total(
        model.subject.kv_bytes(1 + count(one["text"]) + count(one["answer"] + ".") - 1) for one in questions
    )
    assert rows["passkey_generation"]["kv_num_tokens"] == answered.num_tokens / 4
    assert rows["passkey_rolling"]["kv_num_tokens"] == count(questions[0]["short"])


@pytest.mark.slow
def test_the_command_line_of_the_harness_gives_back_the_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval import tasks

    # To read all of its own tasks takes the harness 10 s.
    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
    model = ("--model", "hpu-duo", "--model_args", "dtype=float32,sparsity=0.5")
    from hpu_duo.lab.eval.lm_eval_adapter import run_harness

    (row,) = run_harness(["run", *model, "--tasks", "passkey_generation", "--include_path", str(folder)])
    assert (row["task"], row["num_requests"]) == ("passkey_generation", 4)
    assert 0 < row["held_bytes"] < row["full_bytes"]
    assert adapter().kv.rows() == []


@pytest.mark.slow
def test_generated_answers_are_exact_with_the_pattern_and_lost_without_retrieval(
    tasks: TaskManager, duo: HPUDuoLM, dropping: HPUDuoLM
) -> None:
    assert evaluate(duo, "passkey_generation", tasks)["exact_match"] == 1.0
    assert evaluate(dropping, "passkey_generation", tasks)["exact_match"] == 0.0


def test_dropping_the_needle_lowers_its_log_likelihood(
    questions: list[dict[str, Any]], full: HPUDuoLM, duo: HPUDuoLM, dropping: HPUDuoLM
) -> None:
    """A score taken inside the prefill would be the same for all three."""
    asked = instances("loglikelihood", [(one["text"], one["choices"][one["label"]]) for one in questions])
    with_all, with_pattern, without = (
        model.loglikelihood(asked, disable_tqdm=True) for model in (full, duo, dropping)
    )
    for (best, is_exact), (kept, is_kept), (lost, is_found) in zip(with_all, with_pattern, without):
        assert is_exact
        assert is_kept
        assert not is_found
        assert kept > best - 0.5
        assert lost < best - 10


def test_even_a_single_token_is_scored_after_the_needle_was_dropped(
    questions: list[dict[str, Any]], full: HPUDuoLM, dropping: HPUDuoLM
) -> None:
    first = [(one["text"], " " + one["answer"].split()[0]) for one in questions]
    asked = instances("loglikelihood", first)
    kept, lost = (model.loglikelihood(asked, disable_tqdm=True) for model in (full, dropping))
    assert all(one > -0.1 and other < -2 for (one, _), (other, _) in zip(kept, lost))


def test_log_likelihoods_are_those_of_transformers(questions: list[dict[str, Any]], full: HPUDuoLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, torch_dtype=torch.float32)
    tokenizer = full.tokenizer
    texts = [(questions[0]["text"], choice) for choice in questions[0]["choices"]]
    texts.append(("", questions[0]["short"]))
    scores = full.loglikelihood(instances("loglikelihood", texts), disable_tqdm=True)
    for (context, continuation), (logprob, _) in zip(texts, scores):
        start = tokenizer(context)["input_ids"] if context else [tokenizer.bos_token_id]
        ids = start + tokenizer(continuation, add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
        places = range(len(start), len(ids))
        assert logprob == pytest.approx(sum(float(logprobs[at - 1, ids[at]]) for at in places), abs=1e-3)


def test_rolling_windows_score_each_token_once(
    tasks: TaskManager, questions: list[dict[str, Any]], full: HPUDuoLM
) -> None:
    short, whole = adapter(max_length=32), full
    text = questions[0]["short"]
    (rolled,) = short.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]))
    ids = whole.tok_encode(text, add_special_tokens=False)
    assert len(ids) > 32
    ((one, _),) = whole.loglikelihood(instances("loglikelihood", [("", text)]), disable_tqdm=True)
    (same,) = whole.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]))
    assert same == pytest.approx(one, abs=1e-3)
    # Less context for some tokens: another number, of the same size.
    assert rolled == pytest.approx(one, rel=0.5)
    found = evaluate(whole, "passkey_rolling", tasks)["word_perplexity"]
    assert found == pytest.approx(math.exp(-one / len(text.split())), rel=1e-3)


def test_contexts_that_are_too_long_are_refused_or_cut_at_their_beginning(
    questions: list[dict[str, Any]],
) -> None:
    asked = instances("loglikelihood", [(questions[0]["text"], " zebra.")])
    refusing, cutting = (adapter(max_length=64, truncate=is_cut) for is_cut in (False, True))
    with pytest.raises(ValueError, match="context of at most 62 tokens before 2 others"):
        refusing.loglikelihood(asked, disable_tqdm=True)
    ((logprob, _),) = cutting.loglikelihood(asked, disable_tqdm=True)
    assert logprob < 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": "many"}, "batch_size"),
        ({"sparsty": 0.5}, "expected arguments of HPUDuoLM or HPUDuoModel.from_pretrained, got sparsty"),
        ({"pattern": PATTERN_DIR}, "sparsity or threshold"),
        ({"pattern": HeadPattern.all_retrieval(2, 2)}, "4 layers x 4 KV heads"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    from hpu_duo.lab.eval.lm_eval_adapter import HPUDuoLM

    with pytest.raises(ValueError, match=message):
        HPUDuoLM(**options)


def test_generation_arguments_that_nobody_knows_are_refused(full: HPUDuoLM) -> None:
    with pytest.raises(ValueError, match="num_beams"):
        full.generate_until(instances("generate_until", [("The", {"until": ["."], "num_beams": 4})]))

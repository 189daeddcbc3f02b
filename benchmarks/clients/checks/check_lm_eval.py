"""lm-eval's ``local-completions`` and ``local-chat-completions``, against its ``hpu-duo`` model.

Three kinds of tasks: choices by log-likelihood, rolling log-likelihoods, and texts. Where this project's
interpreter has lm-eval, its own model runs the same tasks without HTTP, and log-likelihoods have to agree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from told import BUILTIN, Told, expect

NAMES = ("Joel", "Nina", "Emma", "Owen")
WORDS = ("loom actor camel", "vase oats copper", "bell poet guard", "vanilla camel loom")
COMMON = "dataset_path: json\ndataset_kwargs: {data_files: {test: DATA}}\ntest_split: test\n"
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "texts": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
""",
    "questions": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
AGREEMENT = 0.02
"""Most that log-likelihoods may be apart, relatively, or in nats below one nat: echo decodes a context token
by token, where the model's own harness prefills it, and both are bfloat16."""


def documents() -> list[dict[str, Any]]:
    """Passkeys, each asked for once."""
    text = " ".join(f"The passkey for {name} is {words}. Remember it." for name, words in zip(NAMES, WORDS))
    choices = [f" {words}" for words in WORDS]
    return [
        {
            "text": f"{text} What is the passkey for {name}? The passkey for {name} is",
            "question": f"{text} What is the passkey for {name}?",
            "choices": choices,
            "label": label,
            "answer": choices[label],
        }
        for label, name in enumerate(NAMES)
    ]


def write_tasks(folder: Path) -> None:
    """Write tasks and their documents as files."""
    folder.mkdir(exist_ok=True)
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents()), encoding="utf-8")
    for name, text in TASKS.items():
        file = folder / f"{name}.yaml"
        file.write_text(f"task: {name}\n{COMMON.replace('DATA', str(data))}{text.lstrip()}", encoding="utf-8")


def run(harness: list[str], folder: Path, kind: str, model: str, tasks: str, *options: str) -> dict[str, Any]:
    """Samples by task, in order of documents."""
    out = folder / f"out-{kind}-{tasks}"
    command = [*harness, "run", "--model", kind, "--model_args", model, "--tasks", tasks]
    rest = ["--include_path", str(folder), "--output_path", str(out), "--log_samples", *options]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "OPENAI_API_KEY": "any"}
    subprocess.run([*command, *rest], check=True, env={**os.environ, **offline}, stdout=sys.stderr)
    told: dict[str, Any] = {}
    for task in tasks.split(","):
        [file] = out.rglob(f"samples_{task}_*.jsonl")
        lines = file.read_text(encoding="utf-8").splitlines()
        told[task] = sorted((json.loads(line) for line in lines), key=lambda one: one["doc_id"])
    return told


def accuracy(samples: list[dict[str, Any]], metric: str) -> float:
    """Mean of a metric."""
    return sum(float(sample[metric]) for sample in samples) / len(samples)


def log_likelihoods(found: dict[str, Any]) -> list[float]:
    """Of all choices and all rolling texts."""
    choices = [float(one[0]) for sample in found["choices"] for one in sample["filtered_resps"]]
    rolling = [float(_first(sample["filtered_resps"])) for sample in found["rolling"]]
    return choices + rolling


def _first(value: Any) -> Any:
    while isinstance(value, list):
        value = value[0]
    return value


def main() -> None:
    """Check that answers are right, and log-likelihoods those of the engine without HTTP."""
    told = Told()
    folder = told.folder / "lm-eval"
    write_tasks(folder)
    harness = [sys.executable, "-m", "lm_eval"]
    place = f"model=builtin,base_url={told.url}/v1/completions,num_concurrent=4"
    place += f",max_length=512,tokenizer={BUILTIN}"
    found = run(harness, folder, "local-completions", place, "rolling,texts")
    # Contexts of choices get a BOS where it is asked for; the harness's other models ask the tokenizer.
    found |= run(harness, folder, "local-completions", f"{place},add_bos_token=True", "choices")
    expect(accuracy(found["choices"], "acc"), 1.0)
    expect(accuracy(found["texts"], "exact_match"), 1.0)
    told.saw("local-completions", "4 of 4 choices and 4 of 4 texts right")
    chat = f"model=builtin,base_url={told.url}/v1/chat/completions,num_concurrent=4"
    asked = run(harness, folder, "local-chat-completions", chat, "questions", "--apply_chat_template")
    expect(accuracy(asked["questions"], "exact_match"), 1.0)
    told.saw("local-chat-completions", "4 of 4 texts right")
    has_own = subprocess.run([told.project_python, "-c", "import lm_eval"], stderr=subprocess.DEVNULL)
    if has_own.returncode == 0:
        ours = [told.project_python, "-m", "hpu_duo.cli", "eval", "lm-eval"]
        own = run(ours, folder, "hpu-duo", f"pretrained={BUILTIN}", "choices,rolling")
        pairs = list(zip(log_likelihoods(found), log_likelihoods(own)))
        apart = [abs(first - second) / max(1.0, abs(second)) for first, second in pairs]
        expect([pair for pair, distance in zip(pairs, apart) if distance > AGREEMENT], [])
        told.saw(
            "log-likelihoods against `--model hpu-duo`",
            f"{len(pairs)}, at most {100 * max(apart):.2f} % apart",
        )
    told.end("lm_eval", "transformers")


if __name__ == "__main__":
    main()

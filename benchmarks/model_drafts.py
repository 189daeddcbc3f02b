"""Measure how many tokens a step gives with drafts of the model itself, on text that the model writes.

Of the built-in model: the text that it goes on with behind half a document, and answers to questions for
passkeys in documents. Of another model: what it goes on with behind ``<bos>`` and a few tokens. Requests run
one by one, and each step verifies as many drafts as there are, whether they pay or not.

    python -m benchmarks.model_drafts [--model DIR] [--drafts 4] [--sparsity 0 0.5] [--window 16 64]
        [--draft-sparsity 1 0.5 0]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.lab.tasks.passkeys import document, question, token_counter
from hpu_duo.sampling import SamplingParams

NUM_TEXTS = 8
MAX_LEN = 2048


def builtin_prompts() -> dict[str, tuple[list[list[int]], int]]:
    """Prompts and most new tokens, by kind."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    texts, questions = [], []
    for seed in range(NUM_TEXTS):
        count = token_counter(tokenizer)
        written = document(count, num_tokens=1500, num_passkeys=4, passkey_words=16, seed=seed)
        tokens = tokenizer(written.text)["input_ids"]
        texts.append(tokens[: len(tokens) // 2])
        asked = written.passkeys[seed % len(written.passkeys)]
        questions.append(tokenizer(written.text + question(asked))["input_ids"])
    return {"running text": (texts, 200), "passkeys": (questions, 18)}


def measure(
    path: Path,
    kinds: Mapping[str, tuple[list[list[int]], int]],
    speculation: Mapping[str, Any],
    options: Mapping[str, Any],
    temperature: float,
) -> dict[str, dict[str, float]]:
    """Tokens a step behind prompts, and accepted drafts by drafts, by kind of text."""
    found = {}
    for kind, (prompts, most) in kinds.items():
        served = HPUDuoModel.from_pretrained(
            path,
            dtype="float32",
            graphs="replay",
            max_num_seqs=1,
            max_num_batched_tokens=MAX_LEN,
            max_model_len=MAX_LEN,
            enable_prefix_caching=False,
            speculative_config=speculation,
            **options,
        )
        tokens = 0
        for seed, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=temperature, max_tokens=most, seed=seed, ignore_eos=kind != "passkeys"
            )
            ((done,),) = served.engine.generate([prompt], params)
            tokens += len(done.token_ids) - 1  # the prompt's step gives the first one
        stats = served.stats()
        drafts = stats.speculation
        assert drafts is not None, "it drafts"
        found[kind] = {
            "tokens a step": round(tokens / (stats.num_steps - len(prompts)), 2),
            "accepted": round(drafts.num_accepted_tokens / max(1, drafts.num_draft_tokens), 3),
        }
    return found


def main() -> None:
    """Print a line for each method and temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--window", type=int, nargs=2, default=[16, 64])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 0.8])
    parser.add_argument("--sparsity", type=float, nargs="*", default=[0.0])
    parser.add_argument("--draft-sparsity", type=float, nargs="*", help="of duo alone; needs a pattern")
    asked = parser.parse_args()
    path = asked.model or Path(MODEL_DIR)
    if asked.model is None:
        kinds = builtin_prompts()
    else:
        kinds = {"running text": ([[1, *range(10 + n, 14 + n)] for n in range(NUM_TEXTS)], 400)}
    common: dict[str, Any] = {
        "num_speculative_tokens": asked.drafts,
        "num_speculative_tokens_per_batch_size": [[1, 1, asked.drafts]],
    }
    window = {"draft_sink": asked.window[0], "draft_recent": asked.window[1]}
    methods: dict[str, dict[str, Any]] = {
        "suffix": {"method": "suffix"},
        "duo": {"method": "duo", **window, "suffix_decoding_max_spec_factor": 1e-9},
        "suffix, then duo": {"method": "duo", **window},
    }
    if asked.draft_sparsity is not None:
        methods = {
            f"duo, {share} of heads": {**methods["duo"], "draft_sparsity": share}
            for share in asked.draft_sparsity
        }
    for sparsity in asked.sparsity:
        options: dict[str, Any] = {"block_size": asked.block_size}
        if sparsity or asked.draft_sparsity is not None:
            options |= {"pattern": PATTERN_DIR, "sparsity": sparsity}
        for temperature in asked.temperature:
            for name, method in methods.items():
                found = measure(path, kinds, {**common, **method}, options, temperature)
                row = {"method": name, "sparsity": sparsity, "temperature": temperature, **found}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

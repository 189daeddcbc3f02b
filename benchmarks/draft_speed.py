"""Measure decodes with drafts against plain ones where a given text plays the output, on one core.

The model does its work in full, a random Llama of 108M parameters in float32; the tokens that it samples
are replaced by those of a text at the sampler, in both engines. Texts are those of ``draft_acceptance``. Runs
of both engines alternate; times are CPU time of steps behind the prompts. Greedy loops of random weights are
no evidence of speed, so there are none.

    python -m benchmarks.draft_speed [--rounds 2] [--tokens 160] [--prompt 512] [--packed] [--json]
        [--drafts 8] [--lens 1 4 9] [--fixed] [--kinds edits]
    python -m benchmarks.draft_speed --half-load [--packed]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.draft_acceptance import VOCAB_SIZE, texts, tokenizer
from hpu_duo import HPUDuoModel
from hpu_duo.engine.stepper import StepHandle, StepResult
from hpu_duo.sampling import SamplingParams

Pair: TypeAlias = tuple[list[int], list[int]]
"""Tokens of a prompt and of the output behind it."""


def make_checkpoint(directory: Path) -> Path:
    """Save the model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=2048,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=8192,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return directory


class Played:
    """An engine whose samples are the tokens of given texts."""

    def __init__(
        self, path: Path, max_len: int, num_rows: int, config: dict[str, Any] | None, is_packed: bool
    ) -> None:
        self.served = HPUDuoModel.from_pretrained(
            path,
            dtype="float32",
            graphs="replay",
            max_num_seqs=num_rows,
            max_num_batched_tokens=512,
            max_model_len=max_len,
            enable_prefix_caching=False,
            pack_weights=is_packed or None,
            speculative_config=config,
        )
        self._texts: dict[str, list[int]] = {}
        runner = self.served.engine.runner
        finish = runner.finish

        def replaced(handle: StepHandle) -> StepResult:
            result, ids = finish(handle), list[int]()
            for row in handle.plan.sampled_rows:
                output = self._texts[row.request.request_id.split("#")[0]]
                first = row.end - row.num_samples + 1 - row.request.num_prompt_tokens
                ids += [output[min(first + place, len(output) - 1)] for place in range(row.num_samples)]
            return replace(result, token_ids=np.array(ids, np.int32))

        runner.finish = replaced  # type: ignore[method-assign]

    def add(self, name: str, pair: Pair) -> None:
        """Add a request whose output is a text."""
        prompt, self._texts[name] = pair
        params = SamplingParams(temperature=0, max_tokens=len(pair[1]), ignore_eos=True)
        self.served.engine.add_request(prompt, params, request_id=name)

    def run(self, pairs: Sequence[Pair]) -> tuple[float, int]:
        """Serve texts together; CPU seconds of the steps behind their prompts, and the number of these."""
        engine, waiting = self.served.engine, set[str]()
        for number, pair in enumerate(pairs):
            self.add(str(number), pair)
            waiting.add(str(number))
        while waiting:
            waiting -= {each.request_id for each in engine.step()}
        began, num_steps = time.process_time(), engine.stats().num_steps
        while engine.has_unfinished:
            engine.step()
        return time.process_time() - began, engine.stats().num_steps - num_steps

    def arriving(self, pairs: Sequence[Pair], gaps: Sequence[float]) -> float:
        """Serve texts that arrive one after the other; returns CPU seconds.

        Args:
            gaps: CPU seconds in front of each; idle time is skipped.
        """
        engine, number, now, due = self.served.engine, 0, 0.0, gaps[0]
        while number < len(pairs) or engine.has_unfinished:
            if not engine.has_unfinished:
                now = max(now, due)
            while number < len(pairs) and due <= now:
                self.add(str(number), pairs[number])
                number += 1
                due += gaps[number] if number < len(pairs) else 0.0
            began = time.process_time()
            engine.step()
            now += time.process_time() - began
        return now


def half_load(path: Path, kinds: dict[str, list[Pair]], num_rows: int, is_packed: bool) -> dict[str, Any]:
    """Steps by whether they verify drafts, or the reason why not, at half of the highest rate.

    Texts of all kinds, twice each, arrive at random.
    """
    rng = random.Random(0)
    pairs = [pair for each in kinds.values() for pair in each] * 2
    rng.shuffle(pairs)
    max_len = max(len(prompt) + len(output) for prompt, output in pairs) + 16
    config = {"num_speculative_tokens": 8, "suffix_decoding_max_cached_requests": 0}
    engine = Played(path, max_len, num_rows, config, is_packed)
    full_s = [engine.arriving(pairs, [0.0] * len(pairs)) for _ in range(2)][1]
    rate, before = len(pairs) / full_s / 2, engine.served.stats().speculation
    took_s = engine.arriving(pairs, [rng.expovariate(rate) for _ in pairs])
    after = engine.served.stats().speculation
    assert before is not None, "it drafts"
    assert after is not None, "it drafts"
    counts = {key: num - before.num_steps_without[key] for key, num in after.num_steps_without.items()}
    counts["drafts"] = after.num_steps - before.num_steps
    total = sum(counts.values())
    return {
        "requests": len(pairs),
        "CPU seconds at once": round(full_s, 1),
        "at half of the rate": round(took_s, 1),
        "steps": total,
        "shares": {key: round(num / total, 3) for key, num in counts.items()},
    }


def main() -> None:
    """Print a row for each kind of text and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--lens", type=int, nargs="*", help="tokens of a verified row; default: the engine's")
    parser.add_argument("--fixed", action="store_true", help="verify all drafts, whether it pays or not")
    parser.add_argument("--kinds", nargs="*", default=["edits", "prose"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--commit", default="HEAD", help="edits are those of the commits up to it")
    parser.add_argument("--half-load", action="store_true", help="count steps of traffic instead")
    parser.add_argument("--packed", action="store_true", help="with pack_weights=True")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    encoder, found = tokenizer(), texts(asked.commit)
    kinds: dict[str, list[Pair]] = {}
    for kind in found if asked.half_load else asked.kinds:
        pairs = [(encoder.encode(prompt).ids, encoder.encode(text).ids) for prompt, text in found[kind]]
        if kind == "prose":
            # Eight pieces of the pages.
            own = [token for prompt, text in pairs for token in (*prompt, *text)]
            size = asked.prompt + asked.tokens
            pairs = [
                (own[place : place + asked.prompt], own[place + asked.prompt : place + size])
                for place in range(0, len(own) - size, max(1, (len(own) - size) // 8))
            ]
        # An edit is found in the file before it: as much of the output as of the prompt.
        kinds[kind] = [(prompt[: asked.prompt], text[: asked.tokens]) for prompt, text in pairs][:8]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        path = make_checkpoint(Path(directory))
        for num_rows in asked.rows:
            if asked.half_load:
                print(json.dumps(half_load(path, kinds, num_rows, asked.packed)), flush=True)
                continue
            max_len = asked.prompt + asked.tokens + 16
            # Rounds repeat texts: outputs of earlier requests are no source of drafts.
            config: dict[str, Any] = {
                "num_speculative_tokens": asked.drafts,
                "suffix_decoding_max_cached_requests": 0,
                "draft_lens": asked.lens,
            }
            if asked.fixed:
                config["num_speculative_tokens_per_batch_size"] = [[1, num_rows, asked.drafts]]
            plain = Played(path, max_len, num_rows, None, asked.packed)
            drafting = Played(path, max_len, num_rows, config, asked.packed)
            for kind, pairs in kinds.items():
                ratios, steps = list[float](), (0, 0)
                for number in range(asked.rounds + 1):
                    some = pairs[number % len(pairs) :][:1] if num_rows == 1 else pairs
                    (before, num_plain), (after, num_drafted) = plain.run(some), drafting.run(some)
                    if number:  # the first round captures graphs and measures steps
                        ratios.append(before / after)
                        steps = steps[0] + num_plain, steps[1] + num_drafted
                rows.append(
                    {
                        "texts": kind,
                        "rows": num_rows,
                        "times as fast": round(statistics.median(ratios), 3),
                        "of rounds": [round(each, 3) for each in ratios],
                        "steps": steps,
                    }
                )
                print(json.dumps(rows[-1]) if asked.json else rows[-1], flush=True)


if __name__ == "__main__":
    main()

"""Program that kvpress's own Python runs: scores and answers behind a cache that a press has cut.

It is run by its path and imports nothing of this package. Each line of standard input is a JSON object, and
gets one as an answer. The first names the ``model`` directory, its ``dtype`` and ``device``, and the number
of threads (``num_threads``); the answer has the ``versions``, or says what is ``missing`` or ``unreadable``.
All others are work:

- ``do``: ``score`` or ``answer``.
- ``press``: ``name``, ``arguments`` and ``attention`` (implementation) of a press; null for full attention.
- ``kept``: tokens of a prompt that the press keeps.
- ``documents``: each with a ``prompt``, as token ids, of which the last ``num_decoded`` are decoded; and
  ``continuations`` to score, or ``max_new_tokens`` and ``ends``.
- ``eos``: token ids that end answers.

A prompt is read and cut as kvpress's own pipeline does it. What follows goes through the model behind the cut
cache, which keeps all of it, at its true positions. Bytes are those of the tensors in the cache.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from importlib import metadata
from typing import Any


class Worker:
    """A model, loaded for the implementation of attention that a press needs.

    Args:
        setting: the first line.

    Raises:
        ImportError: a package is missing.
    """

    def __init__(self, setting: dict[str, Any]) -> None:
        import kvpress
        import torch
        import transformers

        self.kvpress, self.torch, self.transformers = kvpress, torch, transformers
        self.setting = setting
        self.attention = ""
        self.model: Any = None
        torch.set_num_threads(setting["num_threads"])
        is_gpu = setting["device"] == "cuda" or (setting["device"] == "auto" and torch.cuda.is_available())
        self.device = "cuda" if is_gpu else "cpu"
        names = ("kvpress", "torch", "transformers")
        self.versions = {name: metadata.version(name) for name in names} | {"device": self.device}

    def load(self, attention: str) -> None:
        """Load the model for an implementation of attention, unless it is that already."""
        if attention == self.attention:
            return
        # One model at a time in memory.
        self.model, self.attention = None, attention
        # Called torch_dtype up to 4.55; dtype after it, with the old name understood until 5.
        dtype = "dtype" if int(self.versions["transformers"].partition(".")[0]) >= 5 else "torch_dtype"
        loaded = self.transformers.AutoModelForCausalLM.from_pretrained(
            self.setting["model"],
            attn_implementation=attention,
            trust_remote_code=False,
            **{dtype: self.setting["dtype"]},
        )
        self.model = loaded.eval().to(self.device)

    def work(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Scores or answers of all documents, the bytes kept for each, and the time that it took."""
        press = asked["press"]
        self.load("sdpa" if press is None else press["attention"])
        began, began_cpu = time.perf_counter(), time.process_time()
        with self.torch.inference_mode():
            done = [
                self.score(press, asked["kept"], one)
                if asked["do"] == "score"
                else self.answer(press, asked["kept"], one, asked["eos"])
                for one in asked["documents"]
            ]
        spent = {"time_s": time.perf_counter() - began, "cpu_s": time.process_time() - began_cpu}
        return {"documents": done, **spent}

    def read(self, press: dict[str, Any] | None, kept: int, prompt: list[int]) -> Any:
        """The cache behind a prompt, cut to ``kept`` tokens."""
        cache, length = self.transformers.DynamicCache(), len(prompt)
        cutting: Any = nullcontext()
        if press is not None and kept < length:
            # Presses round down, so half a token more is exact.
            made = getattr(self.kvpress, press["name"])(**press["arguments"])
            made.compression_ratio = 1.0 - (kept + 0.5) / length
            cutting = made(self.model)
        if length:
            with cutting:
                self.model.model(self.ids(prompt), past_key_values=cache)
        return cache

    def score(self, press: dict[str, Any] | None, kept: int, document: dict[str, Any]) -> list[Any]:
        """Log-probabilities of each continuation, whether each token is the likeliest, and bytes."""
        prompt = document["prompt"]
        cache = self.read(press, kept, prompt[:-1])
        # A cache that has read nothing has no tensors to go back to.
        tensors = [(layer.keys, layer.values) for layer in cache.layers] if len(prompt) > 1 else None
        found = []
        for wanted in document["continuations"]:
            logits = self.step(cache, [prompt[-1], *wanted[:-1]], len(prompt) - 1).float()
            targets = self.ids(wanted)[0]
            logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
            is_likeliest = logits.argmax(-1) == targets
            told = {"logprobs": logprobs.tolist(), "is_likeliest": is_likeliest.tolist()}
            found.append({**told, **self.bytes(cache, len(prompt) + len(wanted) - 1)})
            if tensors is None:
                cache = self.read(None, 0, [])
                continue
            for layer, (keys, values) in zip(cache.layers, tensors, strict=True):
                layer.keys, layer.values = keys, values
        return found

    def answer(
        self, press: dict[str, Any] | None, kept: int, document: dict[str, Any], eos: list[int]
    ) -> dict[str, Any]:
        """Tokens of the greedy answer, without the one that ends it, and bytes."""
        prompt, ends = document["prompt"], document["ends"]
        num_read = max(0, len(prompt) - document["num_decoded"])
        cache = self.read(press, kept, prompt[:num_read])
        said: list[int] = []
        last, at = prompt[num_read:], num_read
        while len(said) < document["max_new_tokens"]:
            logits = self.step(cache, last, at)[-1]
            at += len(last)
            if ends and not said:
                logits[[*ends, *eos]] = -float("inf")
            last = [int(logits.argmax())]
            if last[0] in ends or last[0] in eos:
                break
            said += last
        return {"ids": said, **self.bytes(cache, at)}

    def step(self, cache: Any, ids: list[int], at: int) -> Any:
        """Logits of tokens that follow the cache, the first of them at position ``at``."""
        positions = self.torch.arange(at, at + len(ids), device=self.device)[None]
        return self.model(self.ids(ids), past_key_values=cache, position_ids=positions).logits[0]

    def ids(self, ids: list[int]) -> Any:
        """Token ids as a batch of one."""
        return self.torch.tensor([ids], device=self.device)

    def bytes(self, cache: Any, num_tokens: int) -> dict[str, int]:
        """Bytes of the tensors in a cache, and of full ones for as many tokens."""
        held = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
        tokens = [layer.keys.shape[2] for layer in cache.layers]
        full = sum(size // length for size, length in zip(held, tokens, strict=True)) * num_tokens
        return {"num_tokens": num_tokens, "held_bytes": sum(held), "full_bytes": full}


def main() -> None:
    """Answer each line of standard input."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What libraries print must not stand between replies.
    os.dup2(2, 1)

    def reply(value: dict[str, Any]) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    setting = json.loads(sys.stdin.readline())
    try:
        worker = Worker(setting)
    except ImportError as error:
        reply({"missing": str(error)})
        return
    try:
        worker.load("sdpa")
    except Exception as error:  # Whatever another release of transformers raises.
        reply({"unreadable": f"{type(error).__name__}: {error}", "versions": worker.versions})
        return
    reply({"versions": worker.versions})
    for line in sys.stdin:
        reply(worker.work(json.loads(line)))


if __name__ == "__main__":
    main()

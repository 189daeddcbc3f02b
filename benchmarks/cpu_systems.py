"""The two systems that ``benchmarks.cpu`` compares, with random models, prompts, and a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams

VOCAB = 32_000


LAYERS = 12


HEADS = 12


def make_checkpoint(directory: Path, num_kv_heads: int, num_layers: int = LAYERS) -> Path:
    """A random Llama of the 110M class in bfloat16, or of fewer layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=768,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=num_kv_heads,
        intermediate_size=2048,
        vocab_size=VOCAB,
        max_position_embeddings=32_768,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = None
    path = directory / f"llama-kv{num_kv_heads}"
    model.save_pretrained(path)
    return path


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def now() -> float:
    """Seconds: of CPU time when one thread does all the work, else of the clock."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds(work: Callable[[], object]) -> float:
    """Time of one call."""
    began = now()
    work()
    return now() - began


class _Clock(StoppingCriteria):
    """Records the time of each token of ``generate``; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.times.append(now())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Baseline:
    """transformers' ``generate`` with its fused attention."""

    def __init__(self, path: Path, cache: str = "dynamic") -> None:
        self.model = LlamaForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()
        self.name = f"transformers, {cache} cache"
        self._options = {"cache_implementation": "static"} if cache == "static" else {}
        self._session: dict[str, object] = {}

    def generate(self, prompts: list[list[int]], new: int) -> list[float]:
        """Greedy, exactly ``new`` tokens, one left-padded batch; returns when each token was there."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        return self._generate(ids, new, attention_mask=mask, **self._options)

    def open(self, tokens: list[int]) -> None:
        """Prefill a prompt and keep its cache, for ``decode``."""
        self._session = {"ids": torch.tensor([tokens]), "cache": DynamicCache()}
        self.decode(1)

    def decode(self, new: int) -> float:
        """Seconds of ``new`` further tokens of the open prompt."""
        ids, cache = self._session["ids"], self._session["cache"]
        began = now()
        times = self._generate(ids, new, past_key_values=cache)
        return times[-1] - began

    def _generate(self, ids: object, new: int, **options: object) -> list[float]:
        clock = _Clock()
        with torch.inference_mode():
            self._session["ids"] = self.model.generate(
                ids,
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
                **options,
            )
        return clock.times


class Ours:
    """This engine, compiled, with the default table for its limits."""

    def __init__(
        self, path: Path, *, max_num_seqs: int, max_model_len: int, max_tokens: int, **options: object
    ) -> None:
        self.model = HPUDuoModel.from_pretrained(
            path,
            enable_prefix_caching=False,
            device="cpu",
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_tokens,
            graphs="compile",
            **options,  # type: ignore[arg-type]
        )

    def run(self, prompts: list[list[int]], new: int | list[int]) -> None:
        """Serve prompts to the end."""
        lengths = new if isinstance(new, list) else [new] * len(prompts)
        for p, length in zip(prompts, lengths):
            self._add(p, length)
        while self.model.engine.has_unfinished:
            self.model.engine.step()

    def open(self, tokens: list[int], new: int) -> None:
        """Prefill a prompt that may grow by ``new`` tokens, for ``decode``."""
        engine = self.model.engine
        self._add(tokens, new)
        while not any(output.token_ids for output in engine.step()):
            pass

    def decode(self, new: int) -> float:
        """Seconds of ``new`` steps of the open prompt."""
        began = now()
        for _ in range(new):
            self.model.engine.step()
        return now() - began

    def _add(self, tokens: list[int], new: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        self.model.engine.add_request(tokens, params)

    def host_ms_per_step(self, work: Callable[[], object]) -> float:
        """Milliseconds that the host spends planning and building one step of ``work``."""
        before = self.model.stats()
        work()
        after = self.model.stats()
        return 1e3 * (after.host_s - before.host_s) / (after.num_steps - before.num_steps)

"""vLLM's CPU build, its engine stepped in this process."""

from __future__ import annotations

import itertools
import os

# Read when vLLM is imported: one process, one thread, no look at the network.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="2",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import protocol
import vllm


class VLLM(protocol.SteppedEngine):
    """vLLM's own defaults, with the prefix cache where the load asks for it."""

    name = f"vLLM {vllm.__version__} (CPU)"

    def __init__(self, limits: protocol.Limits) -> None:
        llm = vllm.LLM(
            str(limits.model),
            dtype="bfloat16" if limits.dtype == "auto" else limits.dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=limits.prefix_caching,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_tokens,
        )
        self._engine, self._names, self._keys = llm.llm_engine, itertools.count(), {}

    def add(self, key: int, prompt: list[int], new: int) -> None:
        name = str(next(self._names))
        self._keys[name] = key
        params = vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> list[int]:
        # Each output of a step that finished its prompt carries one more token.
        return [self._keys[_original(out.request_id)] for out in self._engine.step() if out.outputs]

    def is_busy(self) -> bool:
        return self._engine.has_unfinished_requests()


def _original(request_id: str) -> str:
    return request_id.split("-")[0]


if __name__ == "__main__":
    protocol.main(VLLM)

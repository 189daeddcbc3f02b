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


def start(limits: protocol.Limits) -> tuple[str, protocol.Serve]:
    """Load with vLLM's own defaults, prefix cache off because every system computes every prompt."""
    llm = vllm.LLM(
        str(limits.model),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_tokens,
    )
    engine, names = llm.llm_engine, itertools.count()

    def serve(prompts: list[list[int]], new: list[int], watch: protocol.Stopwatch) -> None:
        for prompt, length in zip(prompts, new):
            params = vllm.SamplingParams(
                temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False
            )
            engine.add_request(str(next(names)), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            if engine.step():
                watch.token()

    return f"vLLM {vllm.__version__} (CPU)", serve


if __name__ == "__main__":
    protocol.main(start)

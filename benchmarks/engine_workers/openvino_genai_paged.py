"""OpenVINO GenAI's continuous batching pipeline over paged attention, weights in 16 bits.

The checkpoint is one that ``openvino_export.py`` wrote. OpenVINO chooses bfloat16, and AVX512 in attention,
by what the processor has. ``ONEDNN_MAX_CPU_ISA`` restricts its products only, and unless float32 is wished
for, the cache of keys and values then has another dtype than the model: "m_ptr != nullptr".
"""

from __future__ import annotations

import itertools
import os

import numpy as np
import openvino
import openvino_genai
import protocol


class Paged(protocol.SteppedEngine):
    """Room for every request, one thread."""

    name = f"OpenVINO GenAI {openvino_genai.__version__.split('-')[0]}"

    def __init__(self, limits: protocol.Limits) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.max_num_batched_tokens = limits.max_tokens
        scheduler.max_num_seqs = limits.max_num_seqs
        scheduler.enable_prefix_caching = False
        properties: dict[str, object] = {"INFERENCE_NUM_THREADS": 1}
        if limits.dtype == "float32" or "ONEDNN_MAX_CPU_ISA" in os.environ:
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        self._pipe = openvino_genai.ContinuousBatchingPipeline(
            str(limits.model), scheduler, "CPU", properties
        )
        self._names, self._handles = itertools.count(), {}

    def add(self, key: int, prompt: list[int], new: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.ignore_eos, config.do_sample, config.max_new_tokens = True, False, new
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._handles[key] = self._pipe.add_request(next(self._names), ids, config)

    def step(self) -> list[int]:
        self._pipe.step()
        keys = [key for key, handle in self._handles.items() if handle.can_read()]
        for key in keys:
            self._handles[key].read()
        return keys

    def is_busy(self) -> bool:
        return self._pipe.has_non_finished_requests()


if __name__ == "__main__":
    protocol.main(Paged)

"""OpenVINO GenAI's continuous batching pipeline over paged attention, weights in 16 bits.

The checkpoint is exported once with optimum-intel. The pipeline wants a tokenizer even for token ids, so
a byte-level one is trained on one sentence; it is never used.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
import openvino_tokenizers
import protocol
from optimum.intel import OVModelForCausalLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def export(model: Path, folder: Path) -> Path:
    """The checkpoint in OpenVINO's format, made at the first call."""
    target = folder / f"openvino-{model.name}"
    if (target / "openvino_detokenizer.xml").is_file():
        return target
    OVModelForCausalLM.from_pretrained(model, export=True, load_in_8bit=False, compile=False).save_pretrained(
        target
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog"],
        trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<s>", "</s>"],
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    encoder, decoder = openvino_tokenizers.convert_tokenizer(fast, with_detokenizer=True)
    openvino.save_model(encoder, target / "openvino_tokenizer.xml")
    openvino.save_model(decoder, target / "openvino_detokenizer.xml")
    return target


class Paged(protocol.SteppedEngine):
    """Room for every request, one thread."""

    name = f"OpenVINO GenAI {openvino_genai.__version__.split('-')[0]}"

    def __init__(self, limits: protocol.Limits) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.max_num_batched_tokens = limits.max_tokens
        scheduler.max_num_seqs = limits.max_num_seqs
        scheduler.enable_prefix_caching = False
        self._pipe = openvino_genai.ContinuousBatchingPipeline(
            str(export(limits.model, limits.cache)), scheduler, "CPU", {"INFERENCE_NUM_THREADS": 1}
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

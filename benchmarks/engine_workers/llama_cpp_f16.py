"""llama.cpp's float16 by its C interface: one batch of all sequences, each decoding as far as it has to."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.metadata import version

import llama_cpp
import protocol


class Batched(protocol.SteppedEngine):
    """A context with one sequence for each request; a step is one ``llama_decode``."""

    name = f"llama.cpp (llama-cpp-python {version('llama-cpp-python')}), f16"

    def __init__(self, limits: protocol.Limits) -> None:
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(limits.model).encode(), options)
        assert self._model, f"llama.cpp cannot load {limits.model}"
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = limits.max_num_seqs * limits.max_model_len
        params.n_batch = params.n_ubatch = limits.max_tokens
        params.n_seq_max = limits.max_num_seqs
        params.n_threads = params.n_threads_batch = 1
        params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context, "llama.cpp cannot create a context"
        self._size, self._batch = limits.max_tokens, llama_cpp.llama_batch_init(limits.max_tokens, 0, 1)
        self._free = list(range(limits.max_num_seqs))
        self._running: list[_Sequence] = []

    def add(self, key: int, prompt: list[int], new: int) -> None:
        """Queue a prompt."""
        self._running.append(_Sequence(key, self._free.pop(), prompt, new))

    def step(self) -> Sequence[int]:
        """Decode one token of each sequence, and as many tokens of prompts as the batch has room for."""
        self._batch.n_tokens = 0
        sampled: list[tuple[int, _Sequence]] = []
        decodes_first = sorted(self._running, key=lambda each: len(each.waiting))
        for each in decodes_first:
            room = self._size - self._batch.n_tokens
            tokens, each.waiting = each.waiting[:room], each.waiting[room:]
            for token in tokens:
                self._append(each, token, wants_logits=False)
            if tokens and not each.waiting:
                last = self._batch.n_tokens - 1
                self._batch.logits[last] = 1
                sampled.append((last, each))
        code = llama_cpp.llama_decode(self._context, self._batch)
        assert code == 0, f"llama_decode returned {code}"
        for place, each in sampled:
            each.waiting = [self._likeliest(place)]
            each.num_left -= 1
        for each in [each for each in self._running if not each.num_left]:
            self._running.remove(each)
            self._free.append(each.number)
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), each.number, -1, -1)
        return [each.key for _, each in sampled]

    def is_busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._running)

    def _append(self, each: _Sequence, token: int, *, wants_logits: bool) -> None:
        batch, place = self._batch, self._batch.n_tokens
        batch.token[place], batch.pos[place] = token, each.position
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, each.number
        batch.logits[place] = wants_logits
        batch.n_tokens += 1
        each.position += 1

    def _likeliest(self, place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, place)
        array = (ctypes.c_float * self._vocab_size).from_address(ctypes.addressof(logits.contents))
        return int(_argmax(array))


class _Sequence:
    """A request under way: tokens to compute next, and outputs that are left."""

    def __init__(self, key: int, number: int, prompt: list[int], new: int) -> None:
        self.key, self.number, self.waiting, self.num_left, self.position = key, number, prompt, new, 0


def _argmax(array: ctypes.Array[ctypes.c_float]) -> int:
    import numpy as np

    return int(np.frombuffer(array, np.float32).argmax())


if __name__ == "__main__":
    protocol.main(Batched)

"""A step's message is plain data, and all that its tokens depend on."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hpu_duo import HPUDuoModel
from hpu_duo.engine.executor import LaunchedStep, StepOutput
from hpu_duo.engine.step_input import StepInput
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, serve
from tests.modeling.families import prompts_of

PROMPTS = prompts_of([30, 12, 1, 22], seed=3)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, logprobs=2),
    SamplingParams(temperature=1.3, seed=4, max_tokens=20, n=3),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3, max_tokens=25),
    SamplingParams(temperature=0, logit_bias={5: 3.0}, max_tokens=5),
]
OPTIONS: dict[str, Any] = {"pattern": PATTERN, "num_blocks": 8, "max_model_len": 64}
"""Few blocks, so that requests are preempted; samples fork, and rows move."""


def overheard(served: HPUDuoModel) -> list[tuple[bytes, StepOutput]]:
    """Pickled messages of everything that is served from now on, and what they gave."""
    executor, heard = served.engine.runner.executor, list[tuple[bytes, StepOutput]]()
    finish: Callable[[LaunchedStep], StepOutput] = executor.finish

    def finish_and_keep(launched: LaunchedStep) -> StepOutput:
        output = finish(launched)
        heard.append((pickle.dumps(launched.message), output))
        return output

    executor.finish = finish_and_keep  # type: ignore[method-assign]
    return heard


def test_another_executor_carries_out_pickled_messages_to_the_same_tokens(tiny: Tiny) -> None:
    first, second = tiny.load(**OPTIONS), tiny.load(**OPTIONS)
    heard = overheard(first)
    serve(first, PROMPTS, PARAMS)
    assert first.stats().num_preemptions
    copies = [0, 0]
    for data, expected in heard:
        message: StepInput = pickle.loads(data)
        copies[0] += message.num_block_copies
        copies[1] += message.num_row_copies
        got = second.engine.runner.executor.execute(message)
        assert got.token_ids.tolist() == expected.token_ids.tolist()
        assert (got.logprobs is None) == (expected.logprobs is None)
        if got.logprobs is not None and expected.logprobs is not None:
            assert all(map(torch.equal, got.logprobs, expected.logprobs))
    assert min(copies) > 0
    assert not second.engine.has_unfinished


def test_a_message_holds_nothing_but_plain_data(tiny: Tiny) -> None:
    served = tiny.load(**OPTIONS)
    heard = overheard(served)
    serve(served, PROMPTS, PARAMS)
    allowed = {"StepInput", "BatchShape", "Phase", "SamplingBatch", "SamplingRoute"}
    for data, _ in heard:
        message: StepInput = pickle.loads(data)
        assert (message.ints.dtype, message.ints.ndim) == (np.int32, 1)
        assert message.sampling is None or message.sampling.floats.dtype == np.float32
        names = _class_names(data)
        assert names <= allowed | {"_frombuffer", "_reconstruct", "dtype", "ndarray"}, names


def _class_names(data: bytes) -> set[str]:
    found = set[str]()

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add(name)
            return super().find_class(module, name)

    Reader(io.BytesIO(data)).load()
    return found


def test_a_message_is_built_without_a_device(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    served = tiny.load(**OPTIONS)
    engine = served.engine
    engine.add_request(PROMPTS[0], PARAMS[0])
    plan = engine.scheduler.plan()
    assert plan is not None
    for name in ("zeros", "empty", "tensor", "from_numpy"):
        monkeypatch.setattr(torch, name, None)
    message = engine.runner.builder.build(plan, {}).message
    monkeypatch.undo()
    again = engine.runner.builder.build(plan, {}).message
    assert np.array_equal(message.ints, again.ints)
    assert message.ints is not again.ints
    assert message.sampled.tolist() == []


def test_the_rows_of_the_host_stand_in_the_message(tiny: Tiny) -> None:
    served = tiny.load()
    heard = overheard(served)
    tokens = served.generate(PROMPTS[:2], max_new_tokens=4, no_repeat_ngram_size=2)
    host_sampled = [pickle.loads(data).host_sampled for data, _ in heard]
    assert (0, 1) in host_sampled
    assert all(output.logits is not None for (_, output), rows in zip(heard, host_sampled) if rows)
    assert (
        tokens.tolist()
        == tiny.load().generate(PROMPTS[:2], max_new_tokens=4, no_repeat_ngram_size=2).tolist()
    )

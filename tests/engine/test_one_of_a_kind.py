"""A loaded model is not copied, and takes its memory with it when it is let go."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch

from graphs import BatchShape, BucketTable, StepCost
from graphs.backends.compile import CompileBackend
from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny
from tests.modeling.families import prompts_of
from tests.tiers import crossed

PARTS: dict[str, Callable[[Any], Any]] = {
    "HPUDuoModel": lambda served: served,
    "Engine": attrgetter("engine"),
    "Runner": attrgetter("engine.runner"),
    "KVStore": attrgetter("engine.runner.store"),
    "StepModel": attrgetter("engine.runner.model"),
    "the transformers model": attrgetter("engine.runner.model.model"),
    "a layer": attrgetter("engine.runner.model.model.model.layers"),
}


def pickled(part: object) -> object:
    return pickle.dumps(part)


def saved(part: object) -> object:
    return torch.save(part, io.BytesIO())


@pytest.mark.parametrize("how", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("part", list(PARTS))
def test_copies_are_refused_by_name(tiny: Tiny, part: str, how: Callable[[object], object]) -> None:
    served = tiny.load()
    whole = PARTS[part](served)
    name = type(whole).__name__ if part[0].isupper() else ""
    with pytest.raises(TypeError, match=f"cannot copy or pickle .*{name}.*from_pretrained"):
        how(whole)


@pytest.fixture
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def use(served: HPUDuoModel) -> None:
    served.warmup()
    served.generate(prompts_of([9, 4]), max_new_tokens=4)


def use_and_fail(served: HPUDuoModel) -> None:
    def fail(_: object) -> None:
        raise LookupError

    served.warmup()
    params = SamplingParams(max_tokens=5, n=2)
    with pytest.raises(LookupError):
        served.engine.generate(prompts_of([9, 4]), params, fail)
    with pytest.raises(ValueError, match="prompt"):
        served.generate([[]])
    served.generate(prompts_of([9]), max_new_tokens=2, logits_processor=[lambda ids, scores: scores])
    served.score(prompts_of([4]), [[[3], [5, 6]]])


TABLE = BucketTable((BatchShape.parse("csu/q16/s32/u48/l4"),), StepCost())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "work"),
    crossed(
        {
            "full": {},
            "duo": {"pattern": PATTERN},
            "bfloat16": {"dtype": "bfloat16"},
            "compiled": {"graphs": CompileBackend("eager"), "buckets": TABLE, "attention": "sdpa"},
            "watched": {"buckets": TABLE, "fail_on_recompile": True},
            "sim": {"device": "hpu-sim"},
            "trimmed": {"trim_chunks": True, "buckets": TABLE},
            "offloaded": {"pattern": PATTERN, "num_blocks": 24, "kv_offloading_size": 0.01},
        },
        {"use": use, "use_and_fail": use_and_fail},
    ),
)
@pytest.mark.usefixtures("_no_garbage_collection", "default_buckets")
def test_a_model_that_is_let_go_frees_its_memory_without_garbage_collection(
    tiny: Tiny, options: dict[str, Any], work: Callable[[HPUDuoModel], None]
) -> None:
    served = tiny.load(**options)
    work(served)
    runner = served.engine.runner
    parts = {
        "model": served,
        "engine": served.engine,
        "runner": runner,
        "layer": runner.model.model.model.layers[0],
        "weight": runner.model.model.model.layers[0].input_layernorm.weight,
        "keys": runner.store.layers[0][0].tensors[0],
        "inputs": runner.executor.inputs,
    }
    left = {name: weakref.ref(part) for name, part in parts.items()}
    del served, runner, parts
    assert [name for name, part in left.items() if part() is not None] == []

"""This engine around random weights in real shapes, and requests whose context is placed, not computed."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu_suite.memory import DUO, llama_config, make_pattern
from benchmarks.gpu_suite.shapes import ModelShape
from graphs import BatchShape, BucketTable
from graphs.shape import Phase
from hpu_duo.config.engine import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    HeadConfig,
    ModelConfig,
    SchedulerConfig,
)
from hpu_duo.engine.engine import Engine
from hpu_duo.heads.permute import ORDER_ATTRIBUTE
from hpu_duo.kv.pool import CopyLists
from hpu_duo.modeling.attention import LAYER_ATTRIBUTE, NAME
from hpu_duo.modeling.loading import dtype_option
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup.assembly import assemble_around


@dataclass(frozen=True)
class Setup:
    """Settings of the engines of a curve.

    Attributes:
        attention: kernels of the parts, as ``HPUDuoModel`` takes them.
        graphs: capture backend of decode steps, by name.
        block_size: tokens of a block.
    """

    device: torch.device
    dtype: torch.dtype
    attention: str
    graphs: str
    block_size: int


def make_model(shape: ModelShape, max_positions: int, setup: Setup) -> PreTrainedModel:
    """A model with random weights, made on the device."""
    torch.manual_seed(0)
    with torch.device(setup.device):
        model = AutoModelForCausalLM.from_config(
            llama_config(shape, max_positions), attn_implementation=NAME, **dtype_option(setup.dtype)
        )
    return model.eval().requires_grad_(False)


@contextmanager
def engine_of(
    model: PreTrainedModel,
    shape: ModelShape,
    system: str,
    setup: Setup,
    *,
    num_tokens: int,
    chunk: int,
    is_captured: bool = False,
    kv_cache_dtype: str = "auto",
) -> Iterator[Engine]:
    """An engine whose stores hold one request of ``num_tokens`` tokens; afterwards they are freed.

    Args:
        chunk: prompt tokens of a step.
        kv_cache_dtype: format of keys and values.
        is_captured: decode steps go through the capture backend, padded to the one shape that holds all.
    """
    graph = GraphConfig(backend="eager", memory_bytes=0)
    if is_captured and setup.graphs != "eager":
        decode = BatchShape(Phase(False, False, True), 1, 0, -(-num_tokens // setup.block_size), 1)
        graph = GraphConfig(backend=setup.graphs, table=BucketTable((decode,)))
    try:
        engine = assemble_around(
            model,
            EngineConfig(
                model=ModelConfig(
                    path="random weights",
                    device=str(setup.device),
                    dtype=setup.dtype,
                    attention=setup.attention,
                ),
                heads=HeadConfig(pattern=make_pattern(shape)) if system == DUO else HeadConfig(),
                cache=CacheConfig(
                    block_size=setup.block_size,
                    kv_cache_dtype=kv_cache_dtype,
                    num_blocks=-(-num_tokens // setup.block_size),
                    enable_prefix_caching=False,
                ),
                scheduler=SchedulerConfig(
                    max_num_seqs=1, max_num_batched_tokens=chunk, max_model_len=num_tokens + 1
                ),
                graph=graph,
            ),
            frozenset(),
        )
        yield engine
        del engine
    finally:
        _strip(model)


@contextmanager
def engine_around(model: PreTrainedModel, **options: Any) -> Iterator[Engine]:
    """An engine with settings by name, in eager steps without a prefix cache; afterwards stores are freed.

    With weights on the host the model can be served no more.
    """
    plain = {"graphs": "eager", "enable_prefix_caching": False, "device": str(model.device)}
    try:
        engine = assemble_around(
            model, EngineConfig.of("random weights", **{**plain, **options}), frozenset()
        )
        yield engine
        del engine
    finally:
        _strip(model)


def decoded(engine: Engine, prompts: Sequence[Sequence[int]], num_new: int) -> tuple[list[list[int]], float]:
    """Tokens of each prompt, and seconds of a step in which all of them decode, the median."""
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    found = {engine.add_request(each, params): list[int]() for each in prompts}
    times: list[float] = []
    while engine.has_unfinished:
        began = time.perf_counter()
        outputs = engine.step()
        if all(found.values()) and len(outputs) == len(prompts):
            times.append(time.perf_counter() - began)
        for each in outputs:
            found[each.request_id] += each.token_ids
    return list(found.values()), statistics.median(times[1:])


def _strip(model: PreTrainedModel) -> None:
    """Remove stores, dispatch and head order: a model can be served again, and its stores are freed."""
    for module in model.modules():
        module.__dict__.pop("forward", None)
        # Weights are random, so whatever order their heads are in now is as good as the first one.
        for name in (LAYER_ATTRIBUTE, ORDER_ATTRIBUTE):
            if hasattr(module, name):
                delattr(module, name)
    free_unused(model.device)


def free_unused(device: torch.device) -> None:
    """Give memory that nobody refers to back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def add_prompt(engine: Engine, length: int, new: int) -> str:
    """Queue a prompt of random tokens that samples ``new`` tokens; returns its id."""
    tokens = np.random.default_rng(0).integers(0, engine.limits.vocab_size, length, dtype=np.int32)
    return engine.add_request(tokens, SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True))


@torch.inference_mode()
def place_context(engine: Engine, length: int, new: int) -> str:
    """A request that has just prefilled ``length`` tokens, without the work: its cache holds random numbers.

    The scheduler plans the prefill as ever, chunk by chunk, so that rows and blocks are allocated as they
    would be; plans are committed without being run, and the stores are filled instead. The first token
    is 0. What a decode reads, and from where, is what it would read after a real prefill.
    """
    request_id = add_prompt(engine, length, new)
    scheduler, store = engine.scheduler, engine.runner.store
    num_sampled = 0
    while not num_sampled:
        plan = scheduler.plan()
        assert plan is not None, "a queued prompt is always scheduled"
        copies = CopyLists.of(plan.moves)
        store.carry_out(*(torch.tensor(each).to(store.device) for each in (copies.blocks, copies.rows)))
        num_sampled = len(plan.sampled_rows)
        scheduler.commit(plan, [0] * num_sampled)
    for layer in store.layers:
        for units in layer:
            for view in units.views:
                placed = view[:-1]  # all but null
                placed.normal_() if placed.is_floating_point() else placed.random_()
    return request_id

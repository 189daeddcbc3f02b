"""Layers whose loops run outside of their graphs serve the same tokens, and compile nothing after warm-up."""

from __future__ import annotations

from dataclasses import replace

import torch

from graphs import BatchShape, BucketTable
from graphs.backends.compile import CompileBackend
from hpu_duo import HPUDuoModel
from hpu_duo.modeling.attention import AttentionLayer
from hpu_duo.sampling import SamplingParams
from kernels_ref.chunks import ChunkBounds
from kernels_ref.slices import Slices
from tests.engine.tiny import PATTERN, Tiny, serve
from tests.modeling.families import prompts_of

TABLE = BucketTable(
    tuple(map(BatchShape.parse, ("--u/q4/s0/u40/l4", "-su/q4/s40/u40/l4", "csu/q16/s40/u40/l4")))
)
PARAMS = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = prompts_of([60, 9, 33, 70])


def load(tiny: Tiny, **options: object) -> HPUDuoModel:
    return tiny.load(pattern=PATTERN, num_blocks=40, **options)


def test_loops_outside_of_layers_serve_the_same_tokens(tiny: Tiny) -> None:
    torch._dynamo.reset()
    expected = serve(load(tiny), PROMPTS, PARAMS)
    backend = CompileBackend("eager", guards=True)
    served = load(tiny, graphs=backend, buckets=TABLE, fail_on_recompile=True)
    bounds = ChunkBounds(score_bytes=2048, unique_bytes=2000, key_slots=16, most_inline=1)
    for module in served.engine.runner.model.model.modules():
        if isinstance(module, AttentionLayer):
            module.spec = replace(module.spec, slices=Slices(4), chunks=bounds)
    served.warmup()
    got = serve(served, PROMPTS, PARAMS)
    assert [each[0].token_ids for each in got] == [each[0].token_ids for each in expected]
    bodies = {key[1] for _, key in backend.keys if isinstance(key, tuple) and key[0] == "loop"}
    assert bodies >= {"own_keys", "shared_chunk", "rings", "unique_chunk", "listed_keys"}

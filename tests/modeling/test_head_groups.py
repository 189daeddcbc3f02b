"""A third kind of head group in the engine, beside blocks and rings: a file, and the line that chooses it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bias_builders import Window
from graphs import BucketTable
from graphs.backends.compile import CompileBackend
from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.startup import heads as start_up
from kernels_ref import Blocks, HeadGroup, Rings
from tests.modeling.dense_oracle import masked_logits, sees
from tests.modeling.driving import greedy_logits
from tests.modeling.families import BLOCK, LENGTHS, Zoo, prompts_of
from tests.modeling.segments import Segments
from tests.tiers import EXHAUSTIVE, crossed

SIZE, WINDOW, NUM_NEW = 7, Window(2, 5), 8
# Layers of blocks alone, without blocks, and with all kinds; the first head that streams has a ring.
MASK = np.array([[1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0]], np.bool_)
TABLE = BucketTable.from_strings(["csu/q16/s60/u60/l6"])


def three_kinds(
    num_retrieval: int, num_streaming: int, window: Window | None, slack: int = 0
) -> tuple[HeadGroup, ...]:
    groups = [HeadGroup(num_retrieval, Blocks())] if num_retrieval else []
    if num_streaming:
        assert window is not None
        groups.append(HeadGroup(1, Rings(window, slack)))
    if num_streaming > 1:
        groups.append(HeadGroup(num_streaming - 1, Segments(SIZE, slack)))
    return tuple(groups)


def sees_own_segment(query: int, key: int) -> bool:
    return key <= query and key // SIZE == query // SIZE


def layer_mask(retrieves: np.ndarray, length: int) -> torch.Tensor:
    """The rule of each head, pair by pair, bool ``[K, length, length]``."""
    masks = []
    for head, retrieval in enumerate(retrieves):
        is_ring = head == np.flatnonzero(~retrieves)[0] if not retrieval else False
        masks.append(
            [
                [
                    k <= q if retrieval else sees(q, k, *WINDOW) if is_ring else sees_own_segment(q, k)
                    for k in range(length)
                ]
                for q in range(length)
            ]
        )
    return torch.tensor(masks)


@pytest.fixture(autouse=True)
def _chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "head_groups", three_kinds)


def load(zoo: Zoo, **options: Any) -> HPUDuoModel:
    pattern = HeadPattern(MASK.astype(np.float32), *WINDOW, retrieval=MASK)
    defaults = {"max_num_seqs": len(LENGTHS), "max_num_batched_tokens": 13, "max_model_len": 80}
    return HPUDuoModel.from_pretrained(
        zoo.load("llama_mha")[1], pattern=pattern, block_size=BLOCK, **{**defaults, **options}
    )


def assert_follows_the_rules(zoo: Zoo, served: HPUDuoModel) -> None:
    model, _ = zoo.load("llama_mha")
    for prompt, (new, logits) in zip(prompts_of(), greedy_logits(served.engine, prompts_of(), NUM_NEW)):
        tokens = [*prompt, *new[:-1]]
        masks = [layer_mask(retrieves, len(tokens)) for retrieves in MASK]
        expected = masked_logits(model, masks, tokens)[len(prompt) - 1 :]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert new == expected.argmax(dim=-1).tolist()


@pytest.mark.parametrize(("attention", "budget"), crossed(["reference", "sdpa"], [8, 13, 64]))
def test_a_third_kind_follows_its_rule_in_batches_chunks_and_decodes(
    zoo: Zoo, attention: str, budget: int
) -> None:
    served = load(zoo, attention=attention, max_num_batched_tokens=budget)
    assert_follows_the_rules(zoo, served)


@pytest.mark.parametrize("graphs", ["replay", pytest.param(CompileBackend("eager"), marks=EXHAUSTIVE)])
def test_captured_layers_find_the_plan_of_their_kind(zoo: Zoo, graphs: str | CompileBackend) -> None:
    served = load(zoo, graphs=graphs, buckets=TABLE)
    assert_follows_the_rules(zoo, served)


def test_stores_take_what_the_memory_plan_says_for_every_kind(zoo: Zoo) -> None:
    store = load(zoo, num_blocks=20, enable_prefix_caching=False).engine.runner.store
    dim = store.plan.layers[0].head_dim
    # The null unit, and the scratch, which both kinds of rows keep.
    num_rows = store.plan.max_num_seqs + 1 + store.plan.max_chunk_rows
    vectors = 0
    for retrieves in MASK:
        num_streaming = int((~retrieves).sum())
        vectors += int(retrieves.sum()) * 21 * BLOCK
        vectors += bool(num_streaming) * num_rows * WINDOW.size + max(0, num_streaming - 1) * num_rows * SIZE
    assert store.num_bytes == store.plan.total_bytes == 2 * vectors * dim * 4
    assert [[units.layout.num_slots for units in cache] for cache in store.layers] == [
        [BLOCK], [WINDOW.size, SIZE], [BLOCK, WINDOW.size, SIZE], [BLOCK, WINDOW.size, SIZE]
    ]  # fmt: skip


@pytest.mark.parametrize("decode_len", [1, 4])
def test_forks_and_rows_of_several_tokens_follow_the_rules(zoo: Zoo, decode_len: int) -> None:
    served = load(zoo, decode_len=decode_len, max_num_batched_tokens=24)
    prompt, *_ = prompts_of([2 * SIZE + 3])
    continuations = prompts_of([5, 9, SIZE], seed=1)
    model, _ = zoo.load("llama_mha")
    for continuation, score in zip(continuations, served.score([prompt], [continuations])[0]):
        tokens = [*prompt, *continuation]
        logits = masked_logits(model, [layer_mask(retrieves, len(tokens)) for retrieves in MASK], tokens)
        logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        expected = logprobs[torch.arange(len(continuation)), torch.tensor(continuation)]
        assert score.logprobs == pytest.approx(expected.tolist(), abs=1e-4)

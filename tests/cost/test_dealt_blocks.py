"""The cost of retrieval heads whose blocks are dealt out over devices."""

from __future__ import annotations

import pytest

from graphs import BatchShape, Phase
from hpu_duo.parallel import HeadExchanges, head_exchanges
from hpu_duo.planning import GAUDI3, Deployment, Serving, Step, Work, roof_seconds
from hpu_duo.planning.fit import dense_model
from hpu_duo.planning.work import OPERATIONS_PER_SCORE
from kernels_ref import PLAIN

MODEL = dense_model(
    "eight",
    num_layers=4,
    hidden_size=1024,
    intermediate_size=2048,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=1000,
    max_positions=1 << 16,
)
CONTEXT = 8 * 128 * 4


def served(num_devices: int, sparsity: float, parallel: str) -> Deployment:
    serving = Serving(GAUDI3, num_devices, retrieval_parallel=parallel, enable_prefix_caching=False)
    return Deployment(MODEL, serving, sparsity, PLAIN, 1 << 16)


def work(deployment: Deployment, step: Step) -> Work:
    return deployment.engine_work.of(deployment.shape_of(step))


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_full_attention_reads_and_computes_as_much_by_context_as_by_head(num_devices: int) -> None:
    by_head, by_context = (served(num_devices, 0.0, each) for each in ("heads", "context"))
    decode = Step(3, CONTEXT - 1)
    assert work(by_context, decode).kv_bytes == work(by_head, decode).kv_bytes
    # A row has a tail of a block on each device.
    tails = 3 * Serving(GAUDI3).block_size * 32 * len(MODEL.layers) * OPERATIONS_PER_SCORE
    further = work(by_context, decode).vector_ops - work(by_head, decode).vector_ops
    assert further == (num_devices - 1) * tails
    assert (work(by_context, decode).sent_bytes > 0) == (num_devices > 1)
    assert by_context.plan(1, 8).bytes_per_request(CONTEXT) == by_head.plan(1, 8).bytes_per_request(CONTEXT)


def test_on_as_many_devices_as_heads_streaming_heads_save_bytes_only_by_context() -> None:
    decode = Step(3, CONTEXT - 1)
    full, by_head, by_context = (
        work(served(8, sparsity, parallel), decode).kv_bytes
        for sparsity, parallel in ((0.0, "heads"), (0.5, "heads"), (0.5, "context"))
    )
    assert by_head == full
    assert by_context == full / 2
    assert served(8, 0.5, "heads").num_promoted == 4 * len(MODEL.layers)
    assert served(8, 0.5, "context").num_promoted == 0


def test_prompts_compute_the_causal_part_once() -> None:
    first = Step(1, 0, 2048)
    assert (
        work(served(8, 0.0, "context"), first).vector_ops == work(served(8, 0.0, "heads"), first).vector_ops
    )


@pytest.mark.parametrize(
    ("phase", "shared", "unique", "expected"),
    [
        # 2 vectors of 16 elements of 2 bytes for each token, for 2 of the 3 heads at most.
        ("c--", 0, 0, HeadExchanges(2 * (2 * 10) * 16 * 2, 0, 1)),
        # Queries of rows, 4 heads for each; and triples of all 3 heads.
        ("--u", 0, 7, HeadExchanges(2 * (2 * 10 + 4 * 5) * 16 * 2 + 5 * 3 * 4 * 18 * 4, 0, 2)),
        ("cs-", 6, 0, HeadExchanges(2 * (2 * 10 + 4 * 10) * 16 * 2, 10 * 4 * 4 * 18 * 4, 2)),
        ("csu", 6, 7, HeadExchanges(2 * (2 * 10 + 4 * 10) * 16 * 2, (10 + 5) * 4 * 4 * 18 * 4, 2)),
    ],
)
def test_what_is_exchanged_follows_from_the_phase(
    phase: str, shared: int, unique: int, expected: HeadExchanges
) -> None:
    bucket = BatchShape(Phase("c" in phase, "s" in phase, "u" in phase), 10, shared, unique, 5)
    assert head_exchanges(3, 4, (16, 16), 2, bucket, 1, 2) == expected
    assert head_exchanges(3, 4, (16, 16), 2, bucket, 1, 1) == HeadExchanges()
    assert head_exchanges(0, 4, (16, 16), 2, bucket, 1, 2) == HeadExchanges()


def test_what_is_sent_goes_over_one_link_to_each_device() -> None:
    sent = Work(sent_bytes=GAUDI3.pair_bytes_per_s)
    assert roof_seconds(sent, GAUDI3, 8).link == 1.0
    assert roof_seconds(sent, GAUDI3, 1).link == 0.0


@pytest.mark.parametrize(("text", "calls"), [("--u/q4/s0/u64/l4", 0), ("c-u/q512/s0/u64/l4", 2)])
def test_layers_by_context_are_cut_where_those_by_head_are(text: str, calls: int) -> None:
    works = [served(8, 0.0, by).engine_work.of(BatchShape.parse(text)) for by in ("heads", "context")]
    assert [work.num_region_calls / len(MODEL.layers) for work in works] == [calls, calls]

"""Padding that linears leave out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphs import BatchShape
from hpu_duo.modeling.attention import LiveRows
from hpu_duo.modeling.packed_linear import PanelLinear, pack_linears
from kernels_ref.x86.library import is_supported
from tests.needs import needs_x86_kernels

here = pytest.mark.skipif(not is_supported(), reason="needs a CPU with AVX512-BF16")
BUCKET, SHAPE = BatchShape.parse("c--/q16/s0/u0/l8"), BatchShape.parse("c--/q10/s0/u0/l3")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 48, bias=False).bfloat16()
        self.head = nn.Linear(32, 100).bfloat16()


@pytest.fixture
def live() -> LiveRows:
    return LiveRows()


@pytest.fixture
def packed(live: LiveRows) -> Pair:
    pair = Pair()
    assert pack_linears(pair, head=pair.head, live=live) == 2
    assert isinstance(pair.layer, PanelLinear)
    assert isinstance(pair.head, PanelLinear)
    return pair


@here
def test_a_layer_leaves_out_padded_tokens_and_the_head_padded_logit_rows(
    live: LiveRows, packed: Pair
) -> None:
    x = torch.randn(1, 16, 32).bfloat16()
    whole, all_logits = packed.layer(x), packed.head(x[:, :8])
    live.set(SHAPE, BUCKET)
    out, logits = packed.layer(x), packed.head(x[:, :8])
    assert torch.equal(out[:, :10], whole[:, :10])
    assert not out[:, 10:].any()
    assert torch.equal(logits[:, :3], all_logits[:, :3])
    assert not logits[:, 3:].any()


@here
def test_a_step_of_padding_computes_no_row_and_the_next_call_all(live: LiveRows, packed: Pair) -> None:
    x = torch.randn(1, 16, 32).bfloat16()
    whole, all_logits = packed.layer(x), packed.head(x[:, :8])
    with live.none_of(BUCKET):
        assert not packed.layer(x).any()
        assert not packed.head(x[:, :8]).any()
    assert torch.equal(packed.layer(x), whole)
    assert torch.equal(packed.head(x[:, :8]), all_logits)


@here
def test_rows_that_are_not_the_tokens_of_the_step_are_all_computed(live: LiveRows, packed: Pair) -> None:
    inputs = [torch.randn(1, 15, 32), torch.randn(2, 8, 32), torch.randn(16, 32)]
    before = [packed.layer(x.bfloat16()) for x in inputs]
    live.set(SHAPE, BUCKET)
    assert all(torch.equal(packed.layer(x.bfloat16()), out) for x, out in zip(inputs, before))


@here
def test_a_compiled_layer_reads_the_numbers_as_it_runs(live: LiveRows, packed: Pair) -> None:
    compiled = torch.compile(packed.layer, fullgraph=True, dynamic=False)
    x = torch.randn(1, 16, 32).bfloat16()
    counts = []
    for query_len in (16, 5, 11):
        live.set(BatchShape(BUCKET.phase, query_len, 0, 0, 1), BUCKET)
        counts.append(int(compiled(x)[0].any(dim=1).sum()))
    assert counts == [16, 5, 11]


@needs_x86_kernels
@pytest.mark.parametrize("store", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_stay_in_their_dtype_for_float32_inputs(live: LiveRows, store: torch.dtype) -> None:
    pair = Pair().to(store)
    weight, bias = pair.head.weight.detach().float(), pair.head.bias.detach().float()
    assert pack_linears(pair, head=pair.head, live=live, arithmetic=torch.float32) == 2
    pair.float()
    assert pair.head.packed.dtype == store
    x = torch.randn(1, 5, 32)
    torch.testing.assert_close(pair.head(x), nn.functional.linear(x, weight, bias))

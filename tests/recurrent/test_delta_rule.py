"""The gated delta rule over rows in chunks."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs import BatchShape
from hpu_duo.kv.plan import LayerKV
from hpu_duo.planning.engine_work import EngineWork
from hpu_duo.planning.model import AttentionSize, ModelSize
from kernels_ref import Blocks, HeadGroup
from kernels_ref.recurrent import DeltaInputs, DeltaRule
from tests.recurrent.steps import run_in_chunks

CHUNKS = st.lists(
    st.lists(st.one_of(st.integers(0, 1), st.integers(0, 70)), min_size=3, max_size=3), min_size=1, max_size=4
)
KIND = DeltaRule(num_heads=2, key_dim=4, value_dim=3)


def inputs_of(x: torch.Tensor) -> DeltaInputs:
    q, k, v, g, beta = x.split([4, 4, 3, 1, 1], dim=-1)
    decay, strength = -torch.nn.functional.softplus(g[..., 0]), beta[..., 0].sigmoid()
    return DeltaInputs.of(q, k, v, decay, strength, normalises=True)


def token_by_token(x: torch.Tensor) -> torch.Tensor:
    memory, outputs = torch.zeros(2, 4, 3), []
    for q, k, v, g, beta in zip(*inputs_of(x)):
        memory = memory * g.exp()[:, None, None]
        change = (v - torch.einsum("hdv,hd->hv", memory, k)) * beta[:, None]
        memory = memory + k[..., None] * change[:, None]
        outputs.append(torch.einsum("hdv,hd->hv", memory, q))
    return torch.stack(outputs)


@given(CHUNKS)
def test_any_chunks_give_what_a_row_gets_token_by_token(chunks: list[list[int]]) -> None:
    """States of rows are left over from earlier requests."""
    generator = torch.Generator().manual_seed(0)
    lengths = [sum(chunk[row] for chunk in chunks) for row in range(3)]
    texts = [torch.randn(length, 2, 13, generator=generator) for length in lengths]
    state = torch.randn(5, 2, 4, 3, generator=generator)
    untouched = state[3].clone()
    found = run_in_chunks([KIND], texts, chunks, lambda step, x: KIND.attend(inputs_of(x), (state,), step))
    for text, got in zip(texts, found):
        if len(text):
            torch.testing.assert_close(got, token_by_token(text), rtol=1e-4, atol=1e-4)
    assert torch.equal(state[3], untouched)


def test_the_cost_model_reads_and_writes_the_states_of_rows() -> None:
    layers = (AttentionSize(4, 2, 8, None),)
    plain = ModelSize("plain", layers, 32, 64, 1000, 10, 128)
    stateful = replace(plain, states=((KIND,),) * 3)
    kv = (LayerKV((HeadGroup(2, Blocks()),), 8),)
    one, both = (EngineWork(size, kv, block_size=16) for size in (plain, stateful))
    decodes, prompts = (BatchShape.parse(text) for text in ("--u/q8/s0/u8/l8", "c--/q64/s0/u0/l1"))
    assert both.of(decodes).kv_bytes - one.of(decodes).kv_bytes == 3 * 8 * 2 * KIND.row_bytes
    assert both.of(decodes).vector_ops - one.of(decodes).vector_ops == 3 * 8 * 7 * 2 * 4 * 3
    # Chunks of 64 tokens of each row, in three passes.
    assert both.of(prompts).kv_bytes - one.of(prompts).kv_bytes == 3 * 2 * 3 * 2 * KIND.row_bytes
    slower = replace(both, decode_len=2)
    assert slower.of(decodes).vector_ops > both.of(decodes).vector_ops, "accepted tokens are applied again"

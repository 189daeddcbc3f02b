"""Experts, expert by expert and in static shapes, against transformers' loop over those that are chosen."""

import copy
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.lab.audit import peak_allocated_bytes
from hpu_duo.modeling import experts
from hpu_duo.modeling.packed_linear import pack_linears
from hpu_duo.startup.tables import LayerHeads, StepSizes
from kernels_ref import HeadGroup
from kernels_ref.chunks import DEFAULT_BOUNDS
from kernels_ref.groups import Blocks
from tests.modeling import test_shared_keys as shared_keys
from tests.modeling import test_value_sizes as value_sizes
from tests.modeling.driving import greedy_logits
from tests.modeling.families import BASE, IS_5, make_config, prompts_of
from tests.needs import needs_x86_kernels
from tests.recurrent import hybrids

pytestmark = pytest.mark.skipif(not IS_5, reason="before 5, experts are modules of their own")
# CI runs these tests once more without our kernels, which other CPUs do not have either.

NUM_EXPERTS = 16
# Gated; gated in another way, with biases and transposed weights; without gates.
KINDS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "mixtral": ("mixtral", "MixtralExperts", "MixtralConfig", {"num_local_experts": NUM_EXPERTS}),
    "of small experts": (
        "mixtral",
        "MixtralExperts",
        "MixtralConfig",
        {"num_local_experts": NUM_EXPERTS, "intermediate_size": 24},
    ),
    "gpt_oss": ("gpt_oss", "GptOssExperts", "GptOssConfig", {"num_local_experts": NUM_EXPERTS}),
    "nemotron_h": (
        "nemotron_h",
        "NemotronHExperts",
        "NemotronHConfig",
        {"n_routed_experts": NUM_EXPERTS, "moe_intermediate_size": 24},
    ),
}


def make_experts(kind: str, seed: int = 0) -> Any:
    module, of_class, config_class, sizes = KINDS[kind]
    sizes = {**{name: BASE[name] for name in ("hidden_size", "intermediate_size")}, **sizes}
    config = make_config(config_class, **sizes)
    config._experts_implementation = "eager"
    made = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), of_class)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made.requires_grad_(False)


def route(num_tokens: int, num_chosen: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, BASE["hidden_size"], generator=generator)
    weights, index = torch.randn(num_tokens, NUM_EXPERTS, generator=generator).softmax(-1).topk(num_chosen)
    return hidden, index, weights


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(
    num_tokens=st.integers(1, 40),
    num_chosen=st.integers(1, 4),
    group_bytes=st.sampled_from((1, 40_000, 1 << 28)),
    seed=st.integers(0, 99),
)
def test_tokens_get_what_their_experts_make_of_them(
    kind: str, num_tokens: int, num_chosen: int, group_bytes: int, seed: int
) -> None:
    made = make_experts(kind)
    routed = route(num_tokens, num_chosen, seed)
    expected = made(*routed)
    for run in (experts.run_experts, experts.run_in_static_shapes):
        torch.testing.assert_close(
            run(made, *routed, group_bytes=group_bytes), expected, atol=1e-4, rtol=1e-4
        )


def share_of(made: Any, first: int, size: int) -> Any:
    """The experts ``[first, first + size)`` alone, as a rank holds them."""
    share = copy.deepcopy(made)
    for name, parameter in made.named_parameters(recurse=False):
        own = parameter[first : first + size].clone()
        setattr(share, name, torch.nn.Parameter(own, requires_grad=False))
    share.first_expert, share.num_experts = first, size
    return share


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(
    num_ranks=st.sampled_from((2, 4, 16)),
    num_tokens=st.integers(1, 12),
    num_chosen=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_shares_of_experts_add_up_to_all(
    kind: str, num_ranks: int, num_tokens: int, num_chosen: int, seed: int
) -> None:
    made, size = make_experts(kind), NUM_EXPERTS // num_ranks
    routed = route(num_tokens, num_chosen, seed)
    # What overflows in an expert that a token has not chosen does not reach it.
    routed[0][0, 0] = 1e20
    expected = made(*routed)
    shares = [share_of(made, rank * size, size) for rank in range(num_ranks)]

    def run_in_static_shapes(share: Any, hidden: torch.Tensor, *chosen: torch.Tensor) -> torch.Tensor:
        return experts.run_in_static_shapes(share, hidden, *experts.of_own(share, *chosen))

    for run in (experts.run_experts, run_in_static_shapes):
        total = sum(run(share, *routed) for share in shares)
        torch.testing.assert_close(total[1:], expected[1:], atol=1e-4, rtol=1e-4)
        assert torch.equal(total.isnan().any(1), expected.isnan().any(1))


@pytest.mark.parametrize(
    "names",
    [
        ("num_local_experts", "num_experts_per_tok"),
        ("moe_num_experts", "moe_topk"),
        ("moe_num_experts", "moe_k"),
        ("num_experts", "top_k_experts"),
    ],
    ids=["mixtral", "aria", "ernie", "gemma4"],
)
def test_memory_of_steps_knows_experts_by_the_names_of_all_families(names: tuple[str, str]) -> None:
    config = SimpleNamespace(hidden_size=32, vocab_size=9, intermediate_size=48, moe_intermediate_size=24)
    for name, number in zip(names, (16, 2)):
        setattr(config, name, number)
    heads = [LayerHeads((HeadGroup(2, Blocks()),), 1, 8)]
    sizes = StepSizes.of_heads(heads, config, 8, 4, decode_len=1, chunks=DEFAULT_BOUNDS)
    assert (sizes.num_experts, sizes.experts_per_token, sizes.expert_size) == (16, 2, 24)
    assert sizes.intermediate_size == 48
    # A rank that holds four of them whole, where its share of the width says 24.
    config.num_held_experts = 4
    sizes = StepSizes.of_heads(heads, config, 8, 4, decode_len=1, chunks=DEFAULT_BOUNDS)
    assert (sizes.num_experts, sizes.expert_size) == (4, 96)


def test_only_a_cpu_that_runs_uncaptured_looks_at_the_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    made, routed = make_experts("mixtral"), route(12, 2, seed=5)
    expected = made(*routed)

    def refuse(*_: Any) -> torch.Tensor:
        raise AssertionError("not this way")

    compiled = torch.compile(experts.run_experts, fullgraph=True, dynamic=False, backend="eager")
    with monkeypatch.context() as patch:
        patch.setattr(experts, "_run_chosen", refuse)
        torch.testing.assert_close(compiled(made, *routed), expected, atol=1e-4, rtol=1e-4)
    with monkeypatch.context() as patch:
        patch.setattr(experts, "run_in_static_shapes", refuse)
        torch.testing.assert_close(experts.run_experts(made, *routed), expected, atol=1e-4, rtol=1e-4)


def in_a_loop() -> torch.nn.ModuleList:
    """Experts that their family runs in a loop; four of them have no weights."""
    sizes = {"n_routed_experts": NUM_EXPERTS - 4, "zero_expert_num": 4, "expert_ffn_hidden_size": 24}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "loop", ("longcat_flash", "LongcatFlashExperts", "LongcatFlashConfig", sizes))
        made = make_experts("loop")
    model: Any = torch.nn.ModuleList([made])
    model.config = SimpleNamespace(_experts_implementation=experts.register_experts())
    return model


def test_a_loop_over_experts_runs_in_static_shapes_with_those_that_return_their_inputs() -> None:
    model, routed = in_a_loop(), route(40, 3, seed=4)
    assert routed[1].max() >= NUM_EXPERTS - 4
    expected = model[0](*routed)
    assert experts.adapt_loops(model) == 1
    assert {len(x) for x in model.parameters()} == {NUM_EXPERTS - 4}
    compiled = torch.compile(model[0], fullgraph=True, dynamic=False, backend="eager")
    for run in (model[0], compiled):
        torch.testing.assert_close(run(*routed), expected, atol=1e-4, rtol=1e-4)


def test_a_loop_with_other_results_stays_as_it_is() -> None:
    model = in_a_loop()

    class Doubled(type(model[0])):  # type: ignore[misc]
        def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
            return super().forward(hidden_states, top_k_index, top_k_weights) * 2

    model[0].__class__ = Doubled
    assert experts.adapt_loops(model) == 0
    assert type(model[0]) is Doubled


@pytest.mark.instruction_set
@needs_x86_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_keep_16_bits_with_float32_arithmetic(kind: str, dtype: torch.dtype) -> None:
    made = make_experts(kind)
    for parameter in made.parameters():
        parameter.copy_(parameter.to(dtype))
    routed = route(12, 2, seed=1)
    expected = made(*routed)
    made.config._experts_implementation = experts.register_experts()
    made = share_of(made.to(dtype), 0, NUM_EXPERTS)
    pack_linears(made, arithmetic=torch.float32, experts=True)
    made.float()
    assert {x.dtype for x in made.buffers() if x.dim() > 3} == {dtype}
    assert all(x.dim() < 3 for x in made.parameters())
    torch.testing.assert_close(made(*routed), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.instruction_set
@needs_x86_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_alone_gets_bit_for_bit_what_it_gets_beside_others(kind: str) -> None:
    made = share_of(make_experts(kind), 0, NUM_EXPERTS)
    made.config._experts_implementation = experts.register_experts()
    pack_linears(made, experts=True)
    assert all(x.dim() < 3 for x in made.parameters())
    routed = route(40, 2, seed=2)
    together = made(*routed)
    for token in range(40):
        assert torch.equal(made(*(each[token : token + 1] for each in routed))[0], together[token])


SMALL = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED_EXPERT = {"shared_expert_intermediate_size": 24}
WITH_EXPERTS: dict[str, Callable[[Path], Any]] = {
    **{
        name: partial(value_sizes.saved, name=name)
        for name, fields in value_sizes.FAMILIES.items()
        if "n_routed_experts" in fields
    },
    "Gemma4TextConfig": partial(
        shared_keys.shared, name="Gemma4TextConfig", enable_moe_block=True, top_k_experts=2, **SMALL
    ),
    "Qwen3NextConfig": partial(
        hybrids.saved, name="Qwen3NextConfig", mlp_only_layers=[], **SMALL, **SHARED_EXPERT
    ),
    "Qwen3_5MoeTextConfig": partial(hybrids.saved, name="Qwen3_5MoeTextConfig"),
    "Lfm2MoeConfig": partial(hybrids.saved, name="Lfm2MoeConfig"),
    "GraniteMoeHybridConfig": partial(
        hybrids.saved, name="GraniteMoeHybridConfig", num_local_experts=4, num_experts_per_tok=2
    ),
    "NemotronHConfig": partial(
        hybrids.saved,
        name="NemotronHConfig",
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
        n_group=1,
        topk_group=1,
    ),
}


@needs_x86_kernels
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("deepseek_v3", "Qwen3NextConfig") else pytest.mark.slow)
        for name in WITH_EXPERTS
    ],
)
def test_no_text_changes_a_bit_of_another_ones_logits(tmp_path: Path, name: str) -> None:
    WITH_EXPERTS[name](tmp_path)
    results = []
    for seed in (0, 1):
        served = hybrids.load(tmp_path, enable_prefix_caching=False)
        modules = served.engine.runner.model.model.modules()
        assert any(isinstance(each, experts.PanelExperts) for each in modules)
        prompts = [*prompts_of([23, 2], seed=seed), prompts_of([31], seed=7)[0]]
        results.append(greedy_logits(served.engine, prompts, 6, forced=[[3, 4, 5, 6, 7, 8]] * 3)[-1][1])
    assert torch.equal(*results)


def test_what_overflows_in_an_expert_that_nobody_chose_is_dropped() -> None:
    made = make_experts("mixtral")
    hidden, index, weights = route(12, 2, seed=3)
    index = index % (NUM_EXPERTS - 1)
    made.down_proj[NUM_EXPERTS - 1] = torch.inf
    expected = made(hidden, index, weights)
    assert expected.isfinite().all()
    torch.testing.assert_close(
        experts.run_in_static_shapes(made, hidden, index, weights), expected, atol=1e-4, rtol=1e-4
    )


def test_what_overflows_in_a_small_expert_that_nobody_chose_is_dropped() -> None:
    made = make_experts("of small experts")
    hidden, index, weights = route(12, 2, seed=3)
    index = index % (NUM_EXPERTS - 1)
    made.gate_up_proj[NUM_EXPERTS - 1] = torch.inf
    expected = made(hidden, index, weights)
    torch.testing.assert_close(
        experts.run_in_static_shapes(made, hidden, index, weights), expected, atol=1e-4, rtol=1e-4
    )


def test_small_experts_in_bfloat16_are_weighed_by_a_router_in_float32() -> None:
    made = make_experts("of small experts").bfloat16()
    hidden, index, weights = route(12, 2, seed=0)
    expected = made(hidden.bfloat16(), index, weights)
    found = experts.run_in_static_shapes(made, hidden.bfloat16(), index, weights)
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.05)


def test_an_hpu_runs_few_groups_of_experts_if_memory_allows() -> None:
    assert experts.experts_at_a_time(128, 48 << 20) == 5
    assert experts.experts_at_a_time(128, 48 << 20, is_hpu=True) == 32
    assert experts.experts_at_a_time(128, 1 << 20, is_hpu=True) == 128
    # Two of these make what an HPU allows.
    assert experts.experts_at_a_time(128, 1 << 30, is_hpu=True) == 2


def test_many_tokens_copy_no_weights() -> None:
    made = make_experts("mixtral")
    routed = route(512, 2, seed=1)
    copied = 512 * 2 * 4 * made.gate_up_proj[0].numel()
    peak = peak_allocated_bytes(lambda: experts.run_in_static_shapes(made, *routed, group_bytes=1 << 20))
    assert peak < min(3 << 20, copied // 2)

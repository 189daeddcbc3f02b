"""The fused operators that each part runs, and the trial that lets them run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from bias_builders import Window
from hpu_duo.lab.sim import fused
from kernels_ref import Softmax
from kernels_ref.chunks import DEFAULT_BOUNDS
from kernels_ref.hpu.attention import ATTENTION, BLOCK_SOFTMAX, SOFTMAX, FusedOperators
from kernels_ref.hpu.trial import try_operators
from tests.kernels_ref.choices import GAUDI2, GAUDI3, Choice
from tests.kernels_ref.scenario import TWO_SIZES, RowSpec, Scenario, World, scenarios

QUICK = settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
CPU = torch.device("cpu")
ON = pytest.mark.parametrize("choice", [GAUDI2, GAUDI3], ids=["gaudi2", "gaudi3"])
MIXED = Scenario(
    (RowSpec(40, 1), RowSpec(30, 12), RowSpec(0, 20), RowSpec(41, 1, 2)),
    8, Window(4, 8), 1, 1, 3, 8, (2, 1, 1, 1), False, 11,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _registered() -> None:
    fused.register()


class Calls(TorchDispatchMode):
    """Counts calls of fused operators, and of exponentials of scores outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fused: Counter[str] = Counter()
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self.softmaxes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "hpu":
            name = func._schema.name.partition("::")[2]
            self.fused[name] += 1
            self.arguments[name] = args
        elif func.overloadpacket is torch.ops.aten.amax and args[0].is_floating_point():
            self.softmaxes += args[0].shape[-1] > 3
        return func(*args, **(kwargs or {}))


def calls_of(choice: Choice, world: World, **asked: Any) -> Calls:
    with Calls() as calls:
        choice.attend(world, **asked)
    return calls


@pytest.mark.slow
@QUICK
@given(
    scenario=scenarios(TWO_SIZES).filter(lambda s: s.kr + s.ks > 0),
    there=st.tuples(*[st.booleans()] * 3),
    choice=st.sampled_from([GAUDI2, GAUDI3]),
)
def test_any_of_the_operators_may_be_missing(
    scenario: Scenario, there: tuple[bool, bool, bool], choice: Choice
) -> None:
    operators = FusedOperators(*there, line_bytes=choice.operators.line_bytes)
    world = World(scenario)
    calls = Calls()
    with calls:
        out = replace(choice, operators=operators).attend(world)
    expected = world.dense()
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=2e-5, rtol=2e-5)
    assert set(calls.fused) <= set(operators.names)


@ON
def test_every_part_is_fused_and_makes_no_scores_that_a_prompt_would(choice: Choice) -> None:
    calls = calls_of(choice, World(MIXED))
    # A slice of the causal part and the shared blocks, a slice of the streaming part and the rings.
    assert calls.fused[ATTENTION] == 4
    # The tails of decode rows and their rings; their whole blocks.
    assert calls.fused[SOFTMAX] == 2
    assert calls.fused[BLOCK_SOFTMAX] == 1
    assert not calls.softmaxes


@ON
@pytest.mark.parametrize("decode_len", [1, 3])
def test_rings_of_decodes_are_one_operator_where_nothing_is_merged(choice: Choice, decode_len: int) -> None:
    rows = (RowSpec(40, 1), RowSpec(3, decode_len), RowSpec(61, 1))
    scenario = Scenario(
        rows, 8, Window(4, 8), 1, 2, 3, 8, (2, 0, 1, 1), False, 5, decode_len=decode_len, slack=decode_len - 1
    )  # fmt: skip
    world = World(scenario)
    with Calls() as calls:
        out = choice.attend(world)
    torch.testing.assert_close(out[: len(world.dense())].double(), world.dense(), atol=2e-5, rtol=2e-5)
    assert not out[len(world.dense()) :].any()
    assert calls.fused == {ATTENTION: 1, SOFTMAX: 1, BLOCK_SOFTMAX: 1}
    portable = replace(choice, operators=choice.operators._replace(row_attention=False))
    torch.testing.assert_close(portable.attend(World(scenario)), out, atol=2e-5, rtol=2e-5)


@ON
def test_what_has_no_soft_cap_is_portable_then(choice: Choice) -> None:
    calls = calls_of(choice, World(MIXED), softcap=5.0)
    assert calls.fused == {SOFTMAX: 2, BLOCK_SOFTMAX: 1}
    assert calls.softmaxes == 4


@pytest.mark.parametrize(
    ("softmax", "mode", "dtype"),
    [(Softmax.EXACT, "None", torch.float32), (Softmax.FAST, "fast", torch.bfloat16)],
)
@ON
def test_fast_softmax_is_asked_of_every_operator(
    choice: Choice, softmax: Softmax, mode: str, dtype: torch.dtype
) -> None:
    chosen = choice.fast() if softmax is Softmax.FAST else choice
    calls = calls_of(chosen, World(MIXED, torch.bfloat16), softmax=softmax)
    assert calls.arguments[ATTENTION][8] == mode
    assert {calls.arguments[name][0].dtype for name in (SOFTMAX, BLOCK_SOFTMAX)} == {dtype}


@pytest.mark.parametrize("num_queries", [1, 16, 2048, 8192])
@pytest.mark.parametrize("block_size", [16, 128, 16384])
def test_a_chunk_of_context_bounds_its_mask_and_its_keys(num_queries: int, block_size: int) -> None:
    key_bytes = 8 * 128 * 2 * block_size
    chunk = DEFAULT_BOUNDS.masked(num_queries, block_size, key_bytes, 2)
    if chunk > 1:
        assert chunk * 3 * num_queries * block_size <= DEFAULT_BOUNDS.mask_bytes
        assert chunk * key_bytes <= DEFAULT_BOUNDS.key_bytes
    portable = DEFAULT_BOUNDS.shared(num_queries * 32, block_size, key_bytes)
    assert chunk >= portable
    if (num_queries, block_size) == (2048, 128):
        assert (chunk, portable) == (64, 2)


# The trial


TRIED: dict[str, Any] = {"device": CPU, "group_size": 3, "head_dim": 24}


@pytest.mark.parametrize("softmax", Softmax)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ON
def test_a_trial_finds_what_is_to_be_known_of_a_device(
    choice: Choice, dtype: torch.dtype, softmax: Softmax
) -> None:
    with fused.named(choice.device):
        tried = try_operators(**TRIED, dtype=dtype, softmax=softmax, line_bytes=choice.operators.line_bytes)
    is_scaled = softmax is Softmax.FAST and dtype == torch.bfloat16
    assert tried.operators == (choice.fast() if is_scaled else choice).operators
    assert tried.problems == ()


def test_maxima_that_lie_elsewhere_than_expected_are_refused() -> None:
    with fused.named("GAUDI3"):
        tried = try_operators(**TRIED, dtype=torch.bfloat16, softmax=Softmax.EXACT, line_bytes=0)
    assert tried.operators.names == (ATTENTION, BLOCK_SOFTMAX)
    assert "softmax_fa2: expected maxima and sums of shape" in tried.problems[0]


def _rounded_maximum(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that subtracts the largest score and returns another one."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out, largest, *rest = function(*args, **kwargs)
        return out, (largest.float() * 1.01).to(largest.dtype), *rest

    return run


def _first_key_twice(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return function(q, k, torch.cat([v[..., :1, :] * 2, v[..., 1:, :]], dim=-2), *rest)

    return run


def _nan(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        first, *rest = function(*args, **kwargs)
        return first * torch.nan, *rest

    return run


def _sums_of_nobody(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that computes the softmax of every block, and leaves none out."""

    def run(scores: Any, bias: Any, owner: Any) -> Any:
        weights, largest, total = function(scores, bias, torch.zeros_like(owner))
        return weights, largest, total * 2

    return run


def _fails(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("synStatus 26")

    return run


BROKEN = [
    (ATTENTION, _rounded_maximum, "off by"),
    (ATTENTION, _first_key_twice, "off by"),
    (ATTENTION, _nan, "off by inf|cannot be distinguished"),
    (ATTENTION, _fails, "synStatus 26"),
    (SOFTMAX, _nan, "off by|cannot be distinguished"),
    (BLOCK_SOFTMAX, _sums_of_nobody, "off by"),
    (BLOCK_SOFTMAX, _fails, "synStatus 26"),
]


def test_attention_that_fails_for_decode_rows_is_called_for_prompts_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    works = torch.ops.hpu.sdpa_recomp_fwd
    monkeypatch.setattr(
        torch.ops.hpu, ATTENTION, lambda q, *rest: (_nan(works) if q.dim() == 4 else works)(q, *rest)
    )
    tried = try_operators(**TRIED, dtype=torch.float32, softmax=Softmax.EXACT, line_bytes=fused.LINE_BYTES)
    assert tried.operators == GAUDI3.operators._replace(row_attention=False)
    assert re.match(f"{ATTENTION} of rows: .*off by", tried.problems[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "broken", "problem"), BROKEN)
def test_operators_that_compute_something_else_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    broken: Callable[..., Any],
    problem: str,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.ops.hpu, name, broken(getattr(torch.ops.hpu, name)))
    tried = try_operators(**TRIED, dtype=dtype, softmax=Softmax.EXACT, line_bytes=fused.LINE_BYTES)
    assert name not in tried.operators.names
    assert len(tried.operators.names) == 2
    (said,) = tried.problems
    assert re.match(f"{name}: .*({problem})", said)


def test_operators_that_are_not_there_are_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels_ref.hpu.trial.exists", lambda name: name == SOFTMAX)
    tried = try_operators(**TRIED, dtype=torch.float32, softmax=Softmax.EXACT, line_bytes=fused.LINE_BYTES)
    assert tried.operators.names == (SOFTMAX,)
    assert tried.problems == tuple(f"{name}: it does not exist here" for name in (ATTENTION, BLOCK_SOFTMAX))

"""Dispatch to Triton kernels: refusals, operators, compilation, bad arguments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from bias_builders import Leading, Window
from graphs.backends.compile import cpu_compile_problem
from kernels_ref import (
    Implementation,
    NewKV,
    Scoring,
    Scratch,
    Step,
    as_units,
    of_stores,
    unified_attention,
)
from kernels_ref.groups import BlockStep, RingStep
from kernels_ref.impl import kernels
from kernels_ref.partial import Partial
from kernels_ref.step import PartInputs
from kernels_ref.triton import availability, launch, operators
from kernels_ref.triton.launch import DeviceLimits
from kernels_ref.units import gather
from tests.kernels_ref.parts import inputs_of
from tests.kernels_ref.scenario import RowSpec, Scenario, World
from tests.triton_interpreter import replacing_once

pytest.importorskip("triton")
needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="looks at tensors on the CPU")

ROOT = Path(__file__).parents[2]
SMALL = Scenario(
    (RowSpec(9, 1), RowSpec(6, 4), RowSpec(0, 3)), 4, Window(2, 3), 2, 1, 2, 16, (1, 1, 1, 1), True, 4
)
RUN = kernels(Implementation.TRITON)


@pytest.fixture(autouse=True, scope="module")
def _fast_interpreter() -> Iterator[None]:
    with replacing_once():
        yield


def python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh process whose environment knows nothing of the interpreter unless told."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env={**clean, **environment}, capture_output=True, text=True
    )


@pytest.mark.slow
def test_operators_and_parts_are_registered_without_importing_triton() -> None:
    done = python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from kernels_ref.impl import Implementation, kernels\n"
        "parts = kernels(Implementation.TRITON)\n"
        "with torch._subclasses.FakeTensorMode():\n"
        "    q, store = torch.empty(3, 2, 4, 64), torch.empty(5, 2, 128, 64)\n"
        "    row = torch.empty(3, dtype=torch.int32)\n"
        "    out = torch.ops.hpu_duo_triton.unique_blocks(q, store, store, row, row, row, 0.0)\n"
        "    assert [list(x.shape) for x in out] == [[3, 2, 4, 64], [3, 2, 4], [3, 2, 4]]\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@needs_interpreter
def test_a_cpu_without_the_interpreter_is_refused() -> None:
    script = (
        "import torch\n"
        "from kernels_ref.triton import operators\n"
        "from tests.triton_interpreter import replacing_once\n"
        "q, store = torch.zeros(1, 1, 1, 16), torch.zeros(2, 1, 4, 16)\n"
        "row = torch.zeros(1, dtype=torch.int32)\n"
        "with replacing_once():\n"
        "    operators.leading_rings(q, store, store, row[:, None, None], 0.0)\n"
    )
    refused = python(script)
    assert "ValueError: attention 'triton' is not available: without a GPU" in refused.stderr
    assert python(script, TRITON_INTERPRET="1").returncode == 0


@needs_interpreter
def test_devices_are_judged_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert availability.problem(torch.device("cpu")) is None
    assert "not on 'hpu:0'" in str(availability.problem(torch.device("hpu:0")))
    assert "interpreter is on" in str(availability.problem(torch.device("cuda")))
    monkeypatch.setattr(availability, "is_installed", lambda: False)
    assert availability.problem(torch.device("cuda")) == "the package triton is not installed"


def small_step() -> tuple[World, torch.Tensor, torch.Tensor, torch.Tensor, Step]:
    world = World(SMALL)
    q, k, v, step = world.inputs()
    assert isinstance(step, Step)
    # A compiled layer is given finite stores, so that results can be compared.
    for units in world.cache:
        for flat in (*units.tensors, *(units.scratch or ())):
            flat.nan_to_num_(0.5)
    return world, q, k, v, step


def operator_calls() -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    world, q, k, v, step = small_step()
    t, (plan, ring) = step.tensors, world.plans(step)
    blocks, rings = world.cache
    stores, ring_stores = blocks.views, rings.views
    q = q.unflatten(1, (-1, SMALL.group))
    full, streaming = q[:, :2], q[:, 2:]
    rows, visible = gather(full, step.row_token), plan.tails.visible
    of_rows = operators.unique_blocks(rows, *stores, t.owner, t.tail_block, visible, 0.0)
    held = (ring.seen.visible.new_zeros(rows.shape[0], 1, 5), *(ring.seen.visible[:, 0],) * 2, 2)
    causal = (t.causal_row, t.positions, t.row_query_start)
    shared = (t.row, t.row_start, t.shared_block, t.shared_start, t.shared_reads)
    return [
        (operators.causal, (full, k[:, :2], v[:, :2], *causal, 0, 0, 0.0)),
        (operators.shared_blocks, (full, *stores, *shared, 0.0)),
        (
            operators.shared_rings,
            (
                streaming, *rings.scratch, t.causal_row, t.positions, t.row_start, t.chunk_row,
                ring.chunk_position, *SMALL.window, 0.0,
            ),
        ),
        (operators.unique_blocks, (rows, *stores, t.owner, t.tail_block, visible, 2.5)),
        (operators.leading_rings, (gather(streaming, step.row_token), *ring_stores, ring.seen.visible, 0.0)),
        (operators.held_rings, (gather(streaming, step.row_token), *ring_stores, *held, 0.0)),
        (
            operators.write_kv,
            (*blocks.tensors, plan.write_index, k[:, :2], v[:, :2]),
        ),
        (operators.finish, (full, [], list(of_rows), step.decode_slot, None)),
    ]  # fmt: skip


@needs_interpreter
@pytest.mark.parametrize("which", range(8))
def test_operators_keep_what_their_schemas_and_fakes_promise(which: int) -> None:
    operator, arguments = operator_calls()[which]
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
@pytest.mark.exhaustive
@needs_interpreter
@pytest.mark.skipif(cpu_compile_problem() is not None, reason="inductor needs a C++ compiler")
def test_a_compiled_layer_equals_the_layer_and_writes_stores_in_place() -> None:
    world, q, k, v, step = small_step()
    spec = world.spec(Implementation.TRITON)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stores: list[torch.Tensor]) -> torch.Tensor:
        blocks, rings = (
            as_units(*stores[2 * i : 2 * i + 2], units.layout, units.scratch)
            for i, units in enumerate(world.cache)
        )
        return unified_attention(q, k, v, (blocks, rings), step, spec)

    flats = [flat for units in world.cache for flat in units.tensors]
    eager, compiled = ([flat.clone() for flat in flats] for _ in range(2))
    function = torch.compile(attend, fullgraph=True, dynamic=False)
    with torch.inference_mode(), torch._inductor.config.patch(force_disable_caches=True):
        wanted = attend(q, k, v, eager)
        got, (code,) = run_and_get_code(function, q, k, v, compiled)
    torch.testing.assert_close(got, wanted, atol=0, rtol=0)
    for changed, expected in zip(compiled, eager):
        torch.testing.assert_close(changed, expected, atol=0, rtol=0)
    writes = re.findall(r"hpu_duo_triton\.write_kv\.default\((\w+), (\w+),", code)
    assert len(writes) == 2, "blocks and rings, once each"
    assert all(store.startswith("arg") for pair in writes for store in pair), writes


CHECKED = Scenario((RowSpec(9, 1), RowSpec(6, 4)), 4, Window(2, 3), 1, 1, 2, 16, (0, 0, 0, 0), True, 4)


def call(part: str, change: Callable[[dict[str, Any]], None]) -> None:
    """A part with one argument spoilt."""
    world = World(CHECKED)
    q, k, v, step = world.inputs()
    assert isinstance(step, Step)
    t, (plan, ring) = step.tensors, world.plans(step)
    q = q.unflatten(1, (-1, 2))
    arguments: dict[str, Any] = {"k": k[:, :1], "v": v[:, :1], "q": q[:, :1], **t._asdict(), **ring._asdict()}
    arguments["q_rows"] = gather(q[:, :1], step.row_token)
    arguments.update(tails=plan.tails.visible)
    arguments.update(visible=ring.seen.visible)
    for kind, units in zip(("blocks", "rings"), world.cache):
        arguments.update(zip((f"{kind}.k", f"{kind}.v"), units.views))
        arguments.update(zip((f"{kind}.k_flat", f"{kind}.v_flat"), units.tensors))
    arguments.update({"scratch.k": world.cache[1].scratch.k, "scratch.v": world.cache[1].scratch.v})
    change(arguments)
    a = arguments
    blocks, rings = (
        units._replace(
            tensors=(a[f"{kind}.k_flat"], a[f"{kind}.v_flat"]), views=(a[f"{kind}.k"], a[f"{kind}.v"])
        )
        for kind, units in zip(("blocks", "rings"), world.cache)
    )
    scratch = Scratch(a["scratch.k"], a["scratch.v"])
    a["seen"] = Leading(a["visible"])
    plan, new = BlockStep(plan.write_index, Leading(a["tails"]), plan.end), NewKV(a["k"], a["v"])
    t = type(t)(*(a[name] for name in t._fields))
    ring = type(ring)(*(a[name] for name in ring._fields))
    match part:
        case "causal":
            RUN.causal(PartInputs(a["q"], new, blocks, t, Scoring()))
        case "shared_blocks":
            RUN.shared_blocks(PartInputs(a["q"], new, blocks, t, Scoring()))
        case "unique_blocks":
            RUN.unique_blocks(PartInputs(a["q_rows"], new, blocks, t, Scoring()), plan)
        case "shared_rings":
            units = rings._replace(scratch=scratch)
            RUN.shared_rings(PartInputs(a["q"], new, units, t, Scoring(), CHECKED.window), ring)
        case "unique_rings":
            RUN.unique_rings(PartInputs(a["q_rows"], new, rings, t, Scoring()), ring)
        case _:
            RUN.write_kv(blocks, plan.write_index, blocks.encode(new))


def edit(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    def apply(arguments: dict[str, Any]) -> None:
        arguments[name] = change(arguments[name])

    return apply


LIKE = "to be torch.float32 like the queries, got"
BAD: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("causal", "q", lambda x: x.double(), "expected q_QKGD to be of one of .* got torch.float64"),
    ("causal", "k", lambda x: x[:-1], r"expected new.k to have shape \[5, 1, 16\], got \[4, 1, 16\]"),
    ("causal", "v", lambda x: x.half(), f"expected new.v {LIKE} torch.float16"),
    ("causal", "k", lambda x: x.repeat(1, 1, 2)[..., ::2], "expected new.k to have contiguous vectors"),
    ("causal", "positions", lambda x: x.long(), "expected positions to be torch.int32, got torch.int64"),
    ("causal", "causal_row", lambda x: x.to("meta"), "expected causal_row on cpu, got meta"),
    ("shared_blocks", "blocks.k", lambda x: x[..., ::2], r"expected units.k to have .* \[any, 1, any, 16\]"),
    (
        "shared_blocks",
        "blocks.v",
        lambda x: x[:, :, ::2],
        "expected the vectors .* of units.v to be contiguous",
    ),
    ("shared_blocks", "shared_reads", lambda x: x[:1], "expected shared_reads to have shape"),
    ("shared_blocks", "shared_start", lambda x: x[:0], "expected shared_start to have shape"),
    ("unique_blocks", "blocks.v", lambda x: x[:2], "expected units.v to lie like units.k"),
    ("unique_blocks", "owner", lambda x: x.new_zeros(99), "expected owner to have at most .* got 99"),
    (
        "unique_blocks",
        "tail_block",
        lambda x: x[:0],
        r"expected tail_block to have .* \[2, 1\], got \[0, 1\]",
    ),
    ("unique_blocks", "tails", lambda x: x.repeat(1, 1, 3), "expected tails.visible of a number .* got 3"),
    ("shared_rings", "chunk_position", lambda x: x[:, 1:], "expected chunk_position to have shape"),
    ("shared_rings", "scratch.k", lambda x: x.bfloat16(), f"expected scratch.k {LIKE} torch.bfloat16"),
    ("shared_rings", "chunk_row", lambda x: x[1:], r"expected chunk_row to have shape \[3\], got \[2\]"),
    ("unique_rings", "visible", lambda x: x[::2], "expected seen.visible to have shape"),
    ("unique_rings", "q_rows", lambda x: x[0], r"expected q_NKHD to have shape \[any, any, any, any\]"),
    ("write_kv", "k", lambda x: x[1:], "expected new.v to have shape"),
    ("write_kv", "blocks.k_flat", lambda x: x.to("meta"), "expected units.k_flat on cpu, got meta"),
    ("write_kv", "blocks.v_flat", lambda x: x.T.contiguous().T, "expected units.v_flat to be contiguous"),
]


@needs_interpreter
@pytest.mark.parametrize(("part", "name", "change", "message"), BAD, ids=[f"{b[0]}-{b[1]}" for b in BAD])
def test_bad_arguments_are_refused_by_name(
    part: str, name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(part, edit(name, change))


FINISH_BAD: list[tuple[str, Any, str]] = [
    ("of_tokens", lambda p: [p] * 4, "expected of_tokens to have at most 3 partials, got 4"),
    ("of_tokens", lambda p: [p._replace(attn=p.attn[1:])], r"expected of_tokens.attn .* \[5, 1, 2, 16\]"),
    (
        "of_tokens",
        lambda p: [p._replace(sum=p.sum.half())],
        "expected of_tokens.sum to be .*float16",
    ),
    ("of_rows", lambda p: p._replace(max=p.max[1:]), r"expected of_rows.max to have shape \[5, 1, 2\]"),
    ("decode_slot", lambda p: torch.zeros(5), "expected decode_slot to be torch.int32, got torch.float32"),
    ("sinks_KG", lambda p: torch.zeros(2), r"expected sinks_KG to have shape \[1, 2\], got \[2\]"),
    (
        "sinks_KG",
        lambda p: torch.zeros(1, 2).double(),
        "expected sinks_KG .* got torch.float64",
    ),
    ("sinks_KG", lambda p: torch.zeros(1, 2, device="meta"), "expected sinks_KG on cpu, got meta"),
]


@needs_interpreter
@pytest.mark.parametrize(("name", "bad", "message"), FINISH_BAD)
def test_bad_parts_of_a_result_are_refused_by_name(name: str, bad: Any, message: str) -> None:
    q = torch.zeros(5, 1, 2, 16)
    part = Partial(q, q[..., 0].contiguous(), q[..., 0].contiguous())
    arguments: dict[str, Any] = {"of_tokens": [part], "of_rows": None, "sinks_KG": None}
    arguments["decode_slot"] = torch.zeros(5, dtype=torch.int32)
    assert RUN.finish(q, **arguments).shape == q.shape
    with pytest.raises(ValueError, match=message):
        RUN.finish(q, **{**arguments, name: bad(part)})


@needs_interpreter
def test_heads_that_are_too_large_are_refused() -> None:
    q, store = torch.zeros(1, 1, 1, 320), torch.zeros(2, 1, 4, 320)
    with pytest.raises(ValueError, match="expected q_NKHD to have a head size of 1 to 256, got 320"):
        RUN.unique_rings(inputs_of(q, units=of_stores(store, store)), RingStep(None, Leading(None), None))  # type: ignore[arg-type]


def test_choices_depend_on_shapes_and_devices_alone() -> None:
    large, small = DeviceLimits(132, 227 << 10), DeviceLimits(84, 99 << 10)
    for dim in (1, 32, 80, 96, 128, 256):
        for dtype in availability.DTYPES:
            for limits in (large, small):
                for chosen in (launch.prefill(dim, dtype, limits), launch.decode(4, dim, dtype, limits)):
                    for size in (chosen.rows, chosen.keys):
                        assert size >= 16
                        assert size & (size - 1) == 0
    assert launch.blocks_per_program(1024, 8, large) == 32
    assert launch.blocks_per_program(0, 8, large) == 1
    assert launch.num_splits(8, 1000, large) == 33
    assert launch.num_splits(8, 4, large) == 4
    assert launch.num_splits(5000, 1000, large) == 1

"""The simulated device computes what the CPU computes, and refuses what an HPU cannot do well."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from hpu_duo.kv.store import mark_null
from hpu_duo.lab import sim
from hpu_duo.lab.sim import HpuRuleViolation, Rule

pytestmark = pytest.mark.usefixtures("simulated_hpu")


def on_device(host: Tensor) -> Tensor:
    return host.to("hpu")


def ints(*values: int) -> Tensor:
    return on_device(torch.tensor(values, dtype=torch.int32))


def table() -> Tensor:
    return on_device(torch.arange(12, dtype=torch.float32).view(4, 3))


def weight() -> Tensor:
    """A bfloat16 weight ``[2, 3]``, as a model on the device has it."""
    linear = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    sim.SimRuntime(sim.install()).place(linear)
    return linear.weight


def in_step(dtype: torch.dtype, act: Callable[[], object]) -> None:
    """Act in a step of a model of a float type."""
    with sim.install().step(dtype):
        act()


def in_graph(act: Callable[[Tensor], object]) -> None:
    """Act in a captured step."""
    x = table()
    with sim.install().graph():
        act(x)


def store() -> Tensor:
    """Keys of three units of two vectors, the last one null."""
    flat = torch.zeros(6, 3, device="hpu")
    mark_null(flat, 4, 6)
    return flat


def write(flat: Tensor, *places: int) -> Tensor:
    return flat.index_copy_(0, ints(*places), torch.ones(len(places), 3, device="hpu"))


def in_region(*acts: Callable[[Tensor], object]) -> None:
    """Act on a store, in a region that is compiled by itself."""
    flat = store()
    with sim.install().region():
        for act in acts:
            act(flat)


BAD: dict[str, tuple[Rule, Callable[[], object]]] = {
    "nonzero": (Rule.DYNAMIC_SHAPE, lambda: table().nonzero()),
    "masked_select": (Rule.DYNAMIC_SHAPE, lambda: table().masked_select(table() > 1)),
    "unique": (Rule.DYNAMIC_SHAPE, lambda: table().unique()),
    "unique of rows": (Rule.DYNAMIC_SHAPE, lambda: table().unique(dim=0)),
    "repeats as a tensor": (Rule.DYNAMIC_SHAPE, lambda: table().repeat_interleave(ints(1, 2, 0, 1), dim=0)),
    "mask as index": (Rule.BOOLEAN_INDEX, lambda: table()[table() > 1]),
    "mask as assignment": (Rule.SCATTER, lambda: table().__setitem__(table() > 1, 0.0)),
    "host operand": (Rule.MIXED_DEVICES, lambda: table() + torch.ones(3)),
    "host index": (Rule.MIXED_DEVICES, lambda: table().index_select(0, torch.tensor([1]))),
    "int64 factory": (Rule.WIDE_DTYPE, lambda: torch.arange(3, device="hpu")),
    "int64 upload": (Rule.WIDE_DTYPE, lambda: on_device(torch.tensor([1, 2]))),
    "int64 sum": (Rule.WIDE_DTYPE, lambda: (table() > 1).sum()),
    "int64 cast": (Rule.WIDE_DTYPE, lambda: ints(1).long()),
    "float64 cast": (Rule.WIDE_DTYPE, lambda: table().double()),
    "int64 operand": (Rule.WIDE_DTYPE, lambda: table().argmax(dim=-1) + 1),
    "computed int64 index": (Rule.WIDE_DTYPE, lambda: table()[table()[:, 0].topk(2).indices * 1]),
    "int64 entries": (Rule.WIDE_DTYPE, lambda: table().topk(2).indices.index_select(0, ints(1))),
    "negative index": (Rule.BAD_INDEX, lambda: table().index_select(0, ints(0, -1))),
    "index past the end": (Rule.BAD_INDEX, lambda: table().index_select(1, ints(3))),
    "negative write": (
        Rule.BAD_INDEX,
        lambda: table().index_copy_(0, ints(-1), torch.ones(1, 3, device="hpu")),
    ),
    "negative token": (Rule.BAD_INDEX, lambda: nn.functional.embedding(ints(-1), table())),
    "negative fancy index": (Rule.BAD_INDEX, lambda: table()[:, ints(0, -2)]),
    "write to a row": (Rule.VIEW_WRITE, lambda: table()[1].zero_()),
    "copy to a row": (Rule.VIEW_WRITE, lambda: table()[1].copy_(table()[2])),
    "add to a slice": (Rule.VIEW_WRITE, lambda: table()[:, 1:].add_(1)),
    "out into a slice": (
        Rule.VIEW_WRITE,
        lambda: torch.add(ints(1, 2), ints(3, 4), out=torch.zeros(4, dtype=torch.int32, device="hpu")[:2]),
    ),
    "float64 number": (Rule.WIDE_DTYPE, lambda: torch.ones((), dtype=torch.float64, device="hpu")),
    "uploaded float64 number": (Rule.WIDE_DTYPE, lambda: on_device(torch.tensor(0.5, dtype=torch.float64))),
    "read number": (Rule.HOST_WAIT, lambda: table().sum().item()),
    "decision of the host": (Rule.HOST_WAIT, lambda: bool((table() > 1).any())),
    "compared tensors": (Rule.HOST_WAIT, lambda: torch.equal(table(), table())),
    "view by strides": (Rule.AS_STRIDED, lambda: table().as_strided((2, 2), (3, 1))),
    "operator of nobody": (Rule.UNKNOWN_OPERATOR, lambda: table().digamma()),
    "two writes to a row": (Rule.REPEATED_INDEX, lambda: table().index_copy_(0, ints(2, 2), table()[:2])),
    "two writes to a column": (
        Rule.REPEATED_INDEX,
        lambda: table().index_copy(1, ints(0, 2, 0), table()),
    ),
    "difference of infinities": (Rule.NAN, lambda: (table() / 0).sub_(table() / 0)),
    "infinity times zero": (
        Rule.NAN,
        lambda: table().clone().fill_(torch.inf) @ torch.zeros(3, 1, device="hpu"),
    ),
    "softmax of nothing": (Rule.NAN, lambda: table().masked_fill(table() > -1, -torch.inf).softmax(dim=-1)),
    "made float16": (Rule.FLOAT_TYPE, lambda: in_step(torch.bfloat16, lambda: table().half())),
    "uploaded float16": (
        Rule.FLOAT_TYPE,
        lambda: in_step(torch.float32, lambda: on_device(torch.ones(2, dtype=torch.float16))),
    ),
    "weight as float32": (Rule.FLOAT_TYPE, lambda: nn.functional.linear(table(), weight().float())),
    "turned weight as float32": (Rule.FLOAT_TYPE, lambda: table() @ weight().t().float()),
    "random numbers of a graph": (Rule.RANDOM_IN_GRAPH, lambda: in_graph(lambda x: torch.rand_like(x))),
    "random choice in a graph": (Rule.RANDOM_IN_GRAPH, lambda: in_graph(lambda x: x.bernoulli_(0.5))),
    "write through a view of a store": (
        Rule.STORE_COPY,
        lambda: store().view(3, 2, 3).index_copy_(0, ints(1), torch.ones(1, 2, 3, device="hpu")),
    ),
    "two writes of a region": (
        Rule.STORE_COPY,
        lambda: in_region(lambda flat: write(flat, 0), lambda flat: write(flat, 1)),
    ),
    "read before a write of a region": (
        Rule.STORE_COPY,
        lambda: in_region(lambda flat: flat.view(3, 6) + 1, lambda flat: write(flat, 1)),
    ),
    "scattered write": (Rule.SCATTER, lambda: table().index_put((ints(0), ints(1)), table()[0, :1])),
}


@pytest.mark.parametrize("name", BAD)
def test_each_rule_names_the_operator_and_the_line_that_broke_it(name: str) -> None:
    rule, break_it = BAD[name]
    with pytest.raises(HpuRuleViolation) as caught, torch.inference_mode():
        break_it()
    assert caught.value.rule is rule
    assert caught.value.operator.startswith("aten.")
    assert __file__ in caught.value.source
    assert caught.value.source.endswith(("in <lambda>", "in on_device", "in write"))
    assert rule.value in str(caught.value)
    assert caught.value.operator in str(caught.value)


GOOD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, i: x @ x.t(),
    "linear": lambda x, i: nn.functional.linear(x, x, x[:, 0]),
    "softmax": lambda x, i: torch.softmax(x, dim=-1),
    "where with a scalar": lambda x, i: torch.where(x > 3, x, 0),
    "gathered rows": lambda x, i: x.index_select(0, i),
    "gathered columns": lambda x, i: x[:, i],
    "written rows": lambda x, i: x.index_copy_(0, i, x.index_select(0, i) * 2),
    "written through a whole view": lambda x, i: x.view(2, 6).index_copy_(0, i[:1] - 1, x.view(2, 6)[1:] * 2),
    "summed by index": lambda x, i: x.index_add(0, i, x[:2]),
    "narrowed argmax": lambda x, i: x.argmax(dim=-1).to(torch.int32) + 1,
    "rows by the indices of topk": lambda x, i: x[x[:, 0].topk(2).indices],
    "rows by a view of such indices": lambda x, i: x[x[:, :2].topk(2).indices.t().reshape(-1)],
    "rows in their order": lambda x, i: x.index_select(0, x[:, 1].argsort()),
    "sorted": lambda x, i: torch.sort(x, dim=-1, descending=True).values,
    "counted": lambda x, i: (x > 3).sum(dim=-1, dtype=torch.int32),
    "repeated": lambda x, i: x.repeat_interleave(2, dim=1),
    "embedded": lambda x, i: nn.functional.embedding(i, x),
    "made": lambda x, i: (
        torch.arange(3, dtype=torch.int32, device=x.device) + x.new_zeros(3) + torch.eye(3).to(x)
    ),
    "rows written twice by filling": lambda x, i: x.index_fill_(0, torch.cat([i, i]), 3.0),
    "weighed in its own type": lambda x, i: nn.functional.linear(x.bfloat16(), x.bfloat16()).float(),
    "random outside of a graph": lambda x, i: torch.zeros_like(x).bernoulli_(1.0),
    "halved outside of a step": lambda x, i: x.half().float(),
    "infinities of one kind": lambda x, i: (x.exp() / 0).neg().exp(),
    "normalised": lambda x, i: nn.functional.rms_norm(x, (3,)),
}


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", GOOD)
def test_good_operators_give_the_numbers_of_the_cpu(name: str, inference: bool) -> None:
    host = torch.randn(4, 3, generator=torch.Generator().manual_seed(3)) * 4
    index = torch.tensor([1, 2], dtype=torch.int32)
    with torch.inference_mode(inference), torch.no_grad():
        got = GOOD[name](on_device(host), on_device(index))
        assert got.device == torch.device("hpu", 0)
        # torch's CPU index_copy_ insists on int64.
        expected = GOOD[name](host.clone(), index.long() if "written" in name else index)
        assert got.dtype == expected.dtype
        assert got.cpu().equal(expected)


def test_a_write_is_seen_through_every_view_of_the_tensor() -> None:
    store = torch.zeros(2, 3, device="hpu")
    row = store[1]
    store.view(-1, 1).index_copy_(0, ints(4), torch.ones(1, 1, device="hpu"))
    assert row.tolist() == [0, 1, 0]


def test_trash_may_be_written_twice_and_its_neighbours_may_not() -> None:
    store = torch.zeros(12, 2, device="hpu")
    mark_null(store, 8, 12)
    new = torch.ones(3, 2, device="hpu")
    store.index_copy_(0, ints(3, 9, 9), new)
    units = store.unflatten(0, (3, 4))
    with sim.allow(Rule.STORE_COPY):
        units.index_copy_(0, ints(1, 2, 2), torch.ones(3, 4, 2, device="hpu"))
        for bad in (
            lambda: store.index_copy_(0, ints(3, 7, 7), new),
            lambda: units.index_copy_(0, ints(1, 1), units[:2]),
        ):
            with pytest.raises(HpuRuleViolation, match="write to a place twice"):
                bad()
    copy = store.clone()
    with pytest.raises(HpuRuleViolation, match="index 9 comes 2 times"):
        copy.index_copy_(0, ints(3, 9, 9), new)


def test_a_store_may_be_written_and_then_read_in_a_region_and_again_in_the_next_one() -> None:
    flat, seen = store(), []
    for place in (0, 1):
        with sim.install().region():
            seen.append(write(flat, place).view(3, 6).sum(dim=1))
    flat.index_select(0, write(flat, 2).new_zeros(1, dtype=torch.int32))
    write(flat, 3)
    assert [each.tolist() for each in seen] == [[3, 0, 0], [6, 0, 0]]


def test_a_step_of_a_float16_model_has_float16() -> None:
    model = nn.Linear(3, 2, dtype=torch.float16)
    runtime = sim.SimRuntime(sim.install())
    runtime.place(model)
    with runtime.step():
        assert model(table().half()).dtype == torch.float16
    for dtype in (torch.bfloat16, torch.float32):
        with sim.install().step(dtype), pytest.raises(HpuRuleViolation, match="makes float16 in a model"):
            model(table().half())


def test_nan_that_was_there_before_is_nobodys_fault() -> None:
    x = on_device(torch.tensor([1.0, torch.nan]))
    assert (x + 1).add_(1).cpu().isnan().tolist() == [False, True]
    assert (torch.empty(4, device="hpu") * 0 + 1).shape == (4,)


def test_transfers_and_waits_are_counted_in_bytes() -> None:
    with sim.watch() as seen:
        x = torch.ones(2, 3).to("hpu")
        torch.zeros(8, device="hpu")[2:5].copy_(torch.ones(3))
        with sim.allow(Rule.HOST_WAIT):
            assert bool((x > 0).all())
        x.cpu()
        x.to(torch.bfloat16).tolist()
    traffic = seen.report().between
    assert (traffic.h2d_copies, traffic.h2d_bytes) == (2, 24 + 12)
    assert (traffic.d2h_reads, traffic.d2h_bytes) == (3, 1 + 24 + 12)


def test_a_recipe_is_new_once_for_each_shape_stride_dtype_and_scalar() -> None:
    def new_recipes(act: Callable[[], object]) -> int:
        with sim.watch() as seen:
            act()
        return seen.report().new_recipes

    x = torch.zeros(5, 7, device="hpu")
    square = torch.zeros(5, 5, device="hpu")
    assert new_recipes(lambda: x * 0.125) == 1
    assert new_recipes(lambda: x * 0.125) == 0
    assert new_recipes(lambda: x * 0.25) == 1
    assert new_recipes(lambda: x[:4] * 0.125) == 1
    assert new_recipes(lambda: x[1:] * 0.125) == 1
    assert new_recipes(lambda: square * 0.125) == 1
    assert new_recipes(lambda: square.t() * 0.125) == 1
    assert new_recipes(lambda: x.view(7, 5)) == 0


def test_an_allowed_rule_is_counted_instead_of_raised() -> None:
    with sim.watch() as seen, sim.allow(Rule.DYNAMIC_SHAPE):
        with pytest.raises(HpuRuleViolation, match="64-bit"):
            table().nonzero()
        with sim.allow(Rule.WIDE_DTYPE):
            assert table().nonzero().shape == (11, 2)
    assert seen.report().excused == {Rule.DYNAMIC_SHAPE: 2, Rule.WIDE_DTYPE: 1}
    with pytest.raises(HpuRuleViolation, match="data-dependent"):
        table().nonzero()


def test_reshaping_in_place_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="resize_"):
        table().resize_(2, 2)


def test_a_placed_module_keeps_shared_weights_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("positions", torch.arange(4))

    tied = Tied()
    expected = tied.head(tied.embed(torch.tensor([1, 4])))
    sim.SimRuntime(sim.install()).place(tied)
    assert tied.head.weight is tied.embed.weight
    assert isinstance(tied.head.weight, nn.Parameter)
    assert tied.positions.device.type == "hpu"
    assert tied.head(tied.embed(ints(1, 4))).cpu().equal(expected)


def test_a_report_says_what_it_does_not_prove() -> None:
    with sim.watch() as seen:
        table()
    console = Console(width=200)
    with console.capture() as shown:
        console.print(seen.report())
    for text in (shown.get(), str(seen.report())):
        assert "host to device" in text
        assert "not show that Synapse compiles" in text
        assert "nor speed, nor device memory" in text


@pytest.mark.slow
def test_the_compiler_works_beside_the_simulated_hpu() -> None:
    script = """
import torch
from torch.nn.attention.flex_attention import flex_attention
from hpu_duo.lab import sim
sim.install()
q = torch.randn(1, 1, 16, 16)
attend = torch.compile(flex_attention, backend="eager", fullgraph=True)
assert torch.allclose(attend(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q), atol=1e-5)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_copies_of_a_stream_end_later_and_their_memory_may_not_change() -> None:
    """Nobody waits for them; until a mark behind them is passed, the target has no numbers."""
    stream = sim.SimRuntime(sim.install()).copy_stream()
    source, host = table(), torch.zeros(4, 3)
    with sim.watch() as seen:
        with stream.after_launched():
            host.copy_(source, non_blocking=True)
            mark = stream.mark()
        assert not mark.is_passed
        assert host.isnan().all()
        assert mark.is_passed
    assert torch.equal(host, source.cpu())
    between = seen.report().between
    assert (between.d2h_reads, between.aside_copies, between.aside_bytes) == (0, 1, 48)

    with stream.after_launched():
        source.copy_(host, non_blocking=True)
        mark = stream.mark()
    host += 1
    with pytest.raises(HpuRuleViolation, match="its source was written before it had ended") as raised:
        mark.wait()
    assert raised.value.rule is Rule.COPY_RACE
    with stream.after_launched(), pytest.raises(HpuRuleViolation, match="has to be non_blocking"):
        host.copy_(source)

"""Placement of weights and keys on a device, its host and a disk, against FlexGen's published model."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hpu_duo import HPUDuoModel
from hpu_duo.cli.app import app
from hpu_duo.cli.planning.plan_offload import _kv_shares
from hpu_duo.engine.on_host.attention import FAR_TILE_BYTES
from hpu_duo.planning.offload import (
    FLEXGEN_T4,
    T4,
    Formula,
    OffloadModel,
    OffloadWork,
    Placement,
    PolicySearch,
    ZigZag,
)

BUILTIN = Path(__file__).parents[2] / "hpu_duo" / "builtin" / "model"


def opt(hidden: int, layers: int, heads: int) -> OffloadModel:
    """OPT in float16: four matrices of attention, two of the feed-forward network."""
    params = 12 * hidden**2
    head_dim = hidden // heads
    return OffloadModel(layers, hidden, 4 * hidden, heads, heads, head_dim, params, 2 * params, 4 * hidden)


OPT_30B, OPT_6_7B = opt(7168, 48, 56), opt(4096, 32, 32)


def flexgen(h: int, layers: int, s: int, n: int, batch: int, number: int, p: Placement) -> float:
    """Tokens a second by the formulas of FlexGen's cost model for OPT, in plain numbers."""
    rows, gb, h2 = batch * number, 2**30, 4 * h
    w = 8 * h**2 + 4 * h * h2
    w_away, kv_away = p.weights_host + p.weights_disk, p.kv_host + p.kv_disk
    a_away = p.activations_host + p.activations_disk
    up = (w * w_away + 2 * s * h * rows * a_away) / (12.89 * gb)
    down = 4 * (s + 1) * h * rows * kv_away / (0.97 * gb) + 2 * s * h * rows * a_away / (4.82 * gb)
    read = (w * p.weights_disk + 2 * s * h * rows * p.activations_disk) / (0.473 * gb)
    write = 4 * rows * (s + 1) * h * p.kv_disk / (0.746 * gb)
    write += 2 * s * h * rows * p.activations_disk / (2.015 * gb)
    compute = rows * (8 * s * h**2 + 4 * s * h * h2) / 21.24e12 + 4 * rows * s**2 * h / 9.97e12
    prefill = max(up + read, down + write, compute)
    up = (w * w_away + 2 * h * rows * a_away) / (12.89 * gb)
    down = 2 * h * rows * a_away / (4.82 * gb)
    read = (4 * rows * (s + n / 2) * h * p.kv_disk + 2 * h * rows * p.activations_disk) / (0.473 * gb)
    read += w * p.weights_disk / (0.95 * 0.473 * gb)
    write = (4 * rows * h * p.kv_disk + 2 * h * rows * p.activations_disk) / (2.015 * gb)
    small, thin = max(0.0, math.log2(64 / batch)), max(0.0, math.log2(4096 / h))
    cpu = 0.0123e12 * max(0.1, 1 + 0.0168 * small * thin - 0.0328 * small - 0.0621 * thin)
    compute = rows * (8 * h**2 + 4 * h * h2) / 4.3e12
    compute += 4 * rows * (s + n / 2) * h * (p.kv_device / 0.079e12 + kv_away / cpu)
    decode = up + max(down, read, write, compute)
    return rows * n / (layers * (prefill + (n - 1) * decode))


shares = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(lambda x: (x[0], (1 - x[0]) * x[1]))
placements = st.lists(shares, min_size=3, max_size=3).map(
    lambda three: Placement(*(each for a, b in three for each in (a, b, 1 - a - b)))
)


@settings(max_examples=50)
@given(placements, st.integers(1, 64), st.integers(1, 20), st.integers(2, 600), st.integers(1, 1024))
def test_prices_are_those_of_flexgen(
    placement: Placement, batch: int, number: int, prompt: int, output: int
) -> None:
    ours = Formula(OPT_6_7B, OffloadWork(prompt, output), FLEXGEN_T4, batch, number, True)
    theirs = flexgen(4096, 32, prompt, output, batch, number, placement)
    assert ours.throughput(placement) == pytest.approx(theirs, rel=1e-9)


PUBLISHED = {32: (32, 5, 7.09), 512: (8, 11, 6.60), 1024: (4, 15, 4.89)}


@pytest.mark.parametrize("output", PUBLISHED)
def test_flexgens_policy_has_its_throughput_and_the_search_is_no_worse(output: int) -> None:
    batch, number, published = PUBLISHED[output]
    search = PolicySearch(OPT_30B, OffloadWork(512, output), FLEXGEN_T4, True, max_batch=32)
    bounds = search.bounds()
    assert bounds[0][0] >= published - 0.005
    theirs = search.bound(batch, number, True)
    assert theirs == pytest.approx(published, rel=0.01)
    policy = bounds[0][1]
    sizes = (7168, 48, 512, output, policy.batch_size, policy.num_batches)
    assert flexgen(*sizes, policy.placement) == pytest.approx(bounds[0][0])


ON_DEVICE = Placement(1, 0, 0, 1, 0, 0, 1, 0, 0)


@pytest.mark.parametrize(("output", "batch"), [(32, 2), (512, 1), (1024, 1)])
def test_the_search_is_no_worse_than_the_runs_of_the_small_model(output: int, batch: int) -> None:
    """FlexGen's runs of OPT-6.7B in H2O's paper had everything on the device, and all of its 16 GiB."""
    machine = replace(FLEXGEN_T4, device_memory=2.0**34)
    bound, policy = PolicySearch(OPT_6_7B, OffloadWork(512, output), machine, True, 32).bounds()[0]
    sizes = 4096, 32, 512, output
    assert bound >= flexgen(*sizes, batch, 1, ON_DEVICE) * (1 - 1e-9)
    assert flexgen(*sizes, policy.batch_size, policy.num_batches, policy.placement) == pytest.approx(bound)


def projected(formula: Formula, placement: Placement) -> float:
    """Tokens a second if all decodes took as long as the first one."""
    shares, num_outputs = (*placement, 1.0), formula.work.output_len
    decode = max(float(form @ shares) for form in formula.rounds(False, 1.0).values())
    seconds = formula.model.num_layers * (formula.seconds(placement)[0] + (num_outputs - 1) * decode)
    return formula.num_rows * num_outputs / seconds


@pytest.mark.parametrize(
    ("output", "flexgen_batches", "h2o_batches", "measured"),
    [
        (32, (48, 3), (52, 14), (8.1, 12.7)),
        (512, (40, 2), (52, 8), (8.5, 18.83)),
        (1024, (48, 1), (44, 6), (7.1, 13.82)),
    ],
)
def test_published_runs_of_the_large_model_are_near_their_predictions(
    output: int, flexgen_batches: tuple[int, int], h2o_batches: tuple[int, int], measured: tuple[float, float]
) -> None:
    """OPT-30B on a T4, KV on the host, 512 tokens in: H2O's paper, and its budget of 20 %.

    Its runs ended after 20 layers of the first decode, and all others were taken to be as long.
    """
    full, budget = Placement(0.2, 0.8, 0, 0, 1, 0, 0, 1, 0), Placement(0, 1, 0, 0, 1, 0, 0, 1, 0)
    first = Formula(OPT_30B, OffloadWork(512, output), FLEXGEN_T4, *flexgen_batches, True)
    other = Formula(OPT_30B, OffloadWork(512, output, 0.2), FLEXGEN_T4, *h2o_batches, True)
    found = projected(first, full), projected(other, budget)
    assert found == pytest.approx(measured, rel=0.12)
    assert 1.4 <= found[1] / found[0] <= 2.4
    # A context of a budget does not grow, the other does: a whole run gains more.
    assert other.throughput(budget) == pytest.approx(found[1], rel=0.01)
    assert first.throughput(full) < found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "output", "low", "high"),
    [
        (OPT_6_7B, 32, 1.5, 3.5),
        pytest.param(OPT_30B, 32, 1.4, 2.4, marks=pytest.mark.exhaustive),
        pytest.param(OPT_6_7B, 512, 1.5, 3.5, marks=pytest.mark.exhaustive),
        pytest.param(OPT_6_7B, 1024, 1.5, 3.5, marks=pytest.mark.exhaustive),
    ],
)
def test_a_budget_of_a_fifth_gains_as_published(
    model: OffloadModel, output: int, low: float, high: float
) -> None:
    full, budget = (PolicySearch(model, OffloadWork(512, output, each), T4, True).best() for each in (1, 0.2))
    assert low <= budget.tokens_per_s / full.tokens_per_s <= high


SMALL = OffloadModel(3, 64, 256, 4, 4, 16, 12 * 64**2, 24 * 64**2, 4 * 64)


def small_machine(device: float, host: float, disk: float, up: float, read: float):
    """A machine whose memories are shares of the model's weights, with tiles beside."""
    unit = SMALL.layer_bytes * SMALL.num_layers
    return replace(
        FLEXGEN_T4,
        device_memory=device * unit + 2.2 * FAR_TILE_BYTES,
        flexgen_memory=False,
        host_memory=host * unit,
        disk=disk * unit,
        up=up,
        disk_read=read,
        disk_read_weights=read,
        score_bytes=0,
        host_fit=(0.0, 0.0, 0.0),
        loads_first=False,
        host_attention=1e9,
        prefill_matrix=1e10,
        decode_matrix=1e10,
    )


machines = st.builds(
    small_machine,
    st.floats(1.2, 4),
    st.floats(0.5, 4),
    st.floats(4, 8),
    st.floats(1e6, 1e9),
    st.floats(1e5, 1e8),
)


@settings(max_examples=40, deadline=None)
@given(machines, st.sampled_from([each.name for each in fields(FLEXGEN_T4) if each.type == "float"]))
def test_more_of_anything_is_never_slower(machine, name: str) -> None:
    better = replace(machine, **{name: 1.5 * getattr(machine, name)})
    work = OffloadWork(24, 8)
    before, after = (PolicySearch(SMALL, work, each, True).bound(2, 2, True) for each in (machine, better))
    assert after >= before * (1 - 1e-6)


@pytest.mark.parametrize(
    "num_cases",
    [
        pytest.param(6, id="few"),
        pytest.param(200, id="many", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_no_whole_placement_is_faster_than_the_found_one_by_more_than_rounding(num_cases: int) -> None:
    thirds = [(a / 3, b / 3, (3 - a - b) / 3) for a in range(4) for b in range(4 - a)]
    halves = [(a / 2, (2 - a) / 2, 0.0) for a in range(3)]
    whole = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]
    fitting: list[int] = []

    @settings(max_examples=num_cases, deadline=None, derandomize=True)
    @given(machines)
    def check(machine) -> None:
        search = PolicySearch(SMALL, OffloadWork(24, 8), machine, True)
        formula = Formula(SMALL, OffloadWork(24, 8), machine, 2, 2, True)
        every = [Placement(*w, *kv, *act) for w, kv, act in product(thirds, whole, halves)]
        speeds = [ZigZag(formula, each).run().tokens_per_s for each in every if formula.fits(each)]
        bound = search.bound(2, 2, True)
        if not speeds:
            return
        fitting.append(len(speeds))
        assert bound >= max(map(formula.throughput, filter(formula.fits, every))) * (1 - 1e-6)
        assert search.whole(2, 2, True).tokens_per_s >= 0.999 * max(speeds)

    check()
    assert len(fitting) >= num_cases / 3


def test_what_moves_has_the_buffers_of_the_engine() -> None:
    """Two buffers of the host for any layers on the disk, and one to three of the device for those away."""
    model, machine = replace(SMALL, num_layers=96), small_machine(4, 4, 4, 1e9, 1e9)
    formula = Formula(model, OffloadWork(24, 8), machine, 2, 2, True)

    def layers(on_device: int, on_host: int) -> tuple[float, float]:
        shares = on_device / 96, on_host / 96, (96 - on_device - on_host) / 96
        peaks = formula.peak_bytes(Placement(*shares, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0))
        device = peaks["device"] - formula.peak_bytes(Placement(1, 0, 0, 1, 0, 0, 1, 0, 0))["device"]
        return device / model.layer_bytes + 96, peaks["host"] / model.layer_bytes

    for shares, expected in (
        ((90, 3), (90 + 2, 3 + 2)),
        ((93, 3), (93 + 3, 3)),
        ((95, 0), (95 + 1, 2)),
    ):
        assert layers(*shares) == pytest.approx(expected)


def test_hidden_states_on_the_host_leave_room_on_the_device() -> None:
    formula = Formula(OPT_6_7B, OffloadWork(512, 32), replace(T4, flexgen_memory=False), 4, 8, True)
    here, there = (
        formula.peak_bytes(Placement(0.5, 0.5, 0.0, 0.0, 1.0, 0.0, share, 1 - share, 0.0)) for share in (1, 0)
    )
    hidden_states = 32 * 512 * OPT_6_7B.act_bytes
    # Of the states of 32 rows, those of two batches of 4 are on their way.
    assert there["device"] == pytest.approx(here["device"] - 24 / 32 * hidden_states)
    assert there["host"] == pytest.approx(here["host"] + hidden_states)


def test_the_search_tries_batches_that_fill_whole_blocks() -> None:
    """The best size of batches has a part of a block of each row on the disk; a whole one would be slow."""
    model = replace(OPT_30B, layer_bytes=OPT_30B.layer_bytes / 4)
    machine = replace(T4, flexgen_memory=False)
    search = PolicySearch(model, OffloadWork(512, 32), machine, False, max_batch=2)
    bound, policy = search.bounds()[0]
    assert policy.placement.kv_disk > 0
    assert search.best().tokens_per_s > 0.9 * bound


def test_a_schedule_of_layers_in_one_memory_takes_the_formulas_time() -> None:
    for shares in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        placement = Placement(*map(float, shares), 0.0, 1.0, 0.0, 0.0, 1.0, 0.0)
        formula = Formula(OPT_6_7B, OffloadWork(512, 64), T4, 8, 4, True)
        assert ZigZag(formula, placement).run().tokens_per_s == pytest.approx(
            formula.throughput(placement), rel=0.01
        )


def test_a_layer_with_a_buffer_of_its_own_is_not_loaded_again() -> None:
    """Times are those of loads: one or three layers that move have a buffer each, of five four share two."""
    machine = replace(small_machine(4, 4, 4, 1e3, 1e2), flexgen_memory=False)
    model = replace(SMALL, num_layers=8)
    formula = Formula(model, OffloadWork(24, 8), machine, 1, 1, True)

    def seconds(on_host: int, on_disk: int) -> float:
        shares = (8 - on_host - on_disk) / 8, on_host / 8, on_disk / 8
        return ZigZag(formula, Placement(*shares, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)).run().decode_s / 7

    computed, load = seconds(0, 0), model.layer_bytes / 1e3
    assert seconds(1, 0) == seconds(0, 1) == seconds(3, 0) == computed
    assert seconds(5, 0) == pytest.approx(4 * load, rel=0.01)
    assert seconds(4, 0) == pytest.approx(4 * load, rel=0.01)
    as_flexgen = Formula(model, OffloadWork(24, 8), replace(machine, flexgen_memory=True), 1, 1, True)
    placement = Placement(7 / 8, 1 / 8, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)
    assert ZigZag(as_flexgen, placement).run().decode_s / 7 == pytest.approx(load, rel=0.01)


def test_bad_percentages_say_what_was_expected() -> None:
    for text, message in (
        ("1,2,3", "six percentages"),
        ("60,60,0,100,0,100", "add up to 100 at most, got 60 and 60"),
        ("0,-1,0,100,0,100", "0 to 100"),
        ("auto", "which hpu-duo plan-offload finds"),
    ):
        with pytest.raises(ValueError, match=message):
            Placement.parse(text)


def run_command(*options: str):
    return CliRunner().invoke(app, ["plan-offload", "--model", str(BUILTIN), "--max-batch", "2", *options])


def test_an_engine_with_the_printed_options_has_the_planned_blocks() -> None:
    words = "--prompt-len", "1024", "--offload-policy", "100,0,40,60,100,0", "--batch", "16x1"
    given = (
        run_command("--host-memory", "2", *words)
        .output.partition("serve with")[2]
        .split("   (on a CPU or GPU)")
    )
    assert len(given) == 2, given
    options = given[0].replace("--no-enable-prefix-caching", "").split()
    named = dict(zip((each[2:].replace("-", "_") for each in options[::2]), options[1::2]))
    sizes = {name: kind(named.pop(name)) for name, kind in (("cpu_attention", float), ("max_num_seqs", int))}
    model = HPUDuoModel.from_pretrained(BUILTIN, enable_prefix_caching=False, **named, **sizes)
    scheduler = model.engine.scheduler
    # Of 9 blocks a row, 5 are on the device; 40 % would be 3.6.
    assert scheduler.allocations.host.num_blocks == 16 * 4
    assert scheduler.limits.num_blocks == 16 * 5


@pytest.mark.parametrize("blocks", [(80, 64), (64, 80), (1475, 15), (3, 99_997), (99_985, 15)])
def test_printed_shares_hold_all_blocks_and_few_more(blocks: tuple[int, int]) -> None:
    percent, gib = _kv_shares(*blocks, 2.0**20)
    held = gib * 1024 * percent / (100 - percent), gib * 1024
    for number, room in zip(blocks, held):
        assert number <= room + 1e-6
        assert room <= number + 1 + 1e-4 * sum(blocks)


def test_the_command_prints_the_policy_and_refuses_what_cannot_be() -> None:
    ran = run_command("--device-memory", "0.03", "--host-memory", "2", "--json")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.output)
    assert found["tokens_per_s"] > 0
    assert found["peak_bytes"]["device"] <= 0.03 * 2**30
    assert not found["host_attention"]
    stored = sum(found["weight_bytes"].values())
    model = found["model"]
    assert stored == pytest.approx(model["layer_bytes"] * model["num_layers"] + model["resident_bytes"])
    given = run_command("--host-memory", "2", "--offload-policy", "0,100,100,0,100,0", "--batch", "4x2")
    assert "4 rows x 2" in given.output
    options = "--offload-policy 25,75,100,0,100,0 --offload-num-batches 2 --max-num-seqs 8"
    assert options in " ".join(given.output.split())
    on_host = ["--host-memory", "2", "--offload-policy", "100,0,40,60,100,0", "--batch"]
    few = " ".join(run_command(*on_host, "4x1").output.split())
    assert "the device has 12 KV blocks, and steps of 2,048 tokens and 4 rows need 28" in few
    on_host[3] = "100,0,60,40,100,0"
    served = " ".join(run_command(*on_host, "8x2").output.split())
    assert "--cpu-attention-mode move --no-enable-prefix-caching --offload-num-batches 2" in served
    on_host[3] = "0,100,100,0,0,100"
    served = " ".join(run_command(*on_host, "2x4").output.split())
    assert "--offload-num-batches 4" in served
    planned = run_command("--host-memory", "2", "--offload-policy", "0,100,0,100,100,0", "--batch", "4x2")
    assert "planned only" in planned.output
    on_t4 = json.loads(run_command("--hardware", "t4", "--json").output)
    assert on_t4["tokens_per_s"] > 0
    assert on_t4["machine"]["up"] == T4.up
    for options, message in (
        (["--hardware", "t4", "--link", "1GB/s"], "expected --link only without --measure and --hardware t4"),
        (
            ["--measure", "/nowhere", "--device-memory", "1"],
            "expected --measure to be an existing folder, got '/nowhere'",
        ),
        (["--device-memory", "0"], "device_memory above 0"),
        (["--device-memory", "0.0001"], "expected memories that hold"),
        (["--offload-policy", "0,100,0,100,0,100"], "--batch"),
        (["--kv-share", "2"], "share of keys and values"),
    ):
        ran = run_command(*options)
        assert ran.exit_code != 0
        assert message in " ".join(ran.output.split()), ran.output

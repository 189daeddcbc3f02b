"""Building without launching: garbage everywhere, and none of it may last."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from graphs import BucketTable
from hpu_duo import HPUDuoModel
from hpu_duo.device.habana import HabanaRuntime
from hpu_duo.lab import sim
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup.warm_up import digest_tables
from tests.engine.tiny import PATTERN, Tiny, tokens_of
from tests.modeling.families import BASE, IS_5, LENGTH_DEPENDENT, prompts_of, save_random

STANDIN = Path(__file__).parents[1] / "sim" / "standin"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = prompts_of([1, 7, 20, 41], seed=3)


@pytest.fixture
def served(tiny: Tiny, simulated_hpu: sim.SimulatedHpu, default_buckets: None) -> HPUDuoModel:
    return tiny.load(device="hpu-sim", pattern=PATTERN)


class CachingRope(torch.nn.Module):
    """Computes the table of all positions when it is first used, and then looks positions up."""

    def __init__(self, original: torch.nn.Module, num_positions: int) -> None:
        super().__init__()
        self.original, self.num_positions = original, num_positions
        self.table: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.table is None:
            every = torch.arange(self.num_positions, dtype=torch.int32, device=x.device)[None]
            cos, sin = self.original(x, every)
            self.table = cos[0], sin[0]
        cos, sin = (part.index_select(0, position_ids[0]) for part in self.table)
        return cos[None], sin[None]


def with_caching_rope(served: HPUDuoModel) -> HPUDuoModel:
    inner: Any = served.engine.runner.model.model.model
    inner.rotary_emb = CachingRope(inner.rotary_emb, 96)
    return served


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[list[list[int]]]:
    return tokens_of(tiny.load(pattern=PATTERN).engine.generate(PROMPTS, GREEDY))


def test_in_compile_only_mode_the_simulated_device_computes_garbage(simulated_hpu: sim.SimulatedHpu) -> None:
    x, y = torch.ones(4, device="hpu"), torch.zeros(4, device="hpu")
    with simulated_hpu.compile_only():
        product, copy, view = x * 2, x.clone(), x[:2]
        y.add_(x)
        y.copy_(x)
        assert torch.ones(2, device="hpu").cpu().isnan().all()
    assert product.cpu().isnan().all()
    assert copy.cpu().isnan().all()
    assert view.tolist() == [1, 1]
    assert y.tolist() == [0, 0, 0, 0]
    assert (x * 2).tolist() == [2, 2, 2, 2]


def test_tables_and_tokens_are_right_after_a_warm_up_that_launched_nothing(
    served: HPUDuoModel, expected: list[list[list[int]]]
) -> None:
    with_caching_rope(served)
    report = served.warmup(compile_only=True)
    runner = served.engine.runner
    assert report.num_captured == len(runner.graphs.table)
    rope: Any = runner.model.model.model.rotary_emb
    every = torch.arange(96, dtype=torch.int32, device="hpu")[None]
    for kept, again in zip(rope.table, rope.original(torch.zeros(1, device="hpu"), every)):
        assert torch.equal(kept.cpu(), again[0].cpu())
    for layer in runner.store.layers:
        assert all(torch.isfinite(view.cpu()).all() for units in layer for view in units.views)
    with sim.watch() as seen:
        assert tokens_of(served.engine.generate(PROMPTS, GREEDY)) == expected
    assert (seen.report().new_graphs, seen.report().new_recipes) == (0, 0)
    assert runner.graphs.counters.late_captures == 0


def test_a_table_that_is_first_filled_while_nothing_is_launched_is_found(
    served: HPUDuoModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_caching_rope(served)
    monkeypatch.setattr(served.engine.runner.warmup, "touch", lambda bucket: None)
    with pytest.raises(RuntimeError, match=r"rotary_emb\.table\[0\], .*rotary_emb\.table\[1\]: filled or"):
        served.warmup(compile_only=True)


def test_steps_fill_no_frequencies_of_long_texts(tmp_path: Path) -> None:
    rope = {"rope_parameters" if IS_5 else "rope_scaling": LENGTH_DEPENDENT[1]}
    save_random(LlamaConfig(**{**BASE, "num_hidden_layers": 1}, **rope), tmp_path)
    served = HPUDuoModel.from_pretrained(
        tmp_path, graphs="eager", block_size=8, max_num_seqs=2, max_num_batched_tokens=16, num_blocks=16
    )
    model = served.engine.runner.model.model
    # Looked over at load, as every model is.
    before = digest_tables(model)
    served.engine.generate(PROMPTS[:1], GREEDY)
    assert digest_tables(model) == before
    assert any(name.endswith("rotary_emb.inv_freq") for name in before)
    assert not any("long_inv_freq" in name for name in before)


def test_a_warm_up_changes_no_table(tiny: Tiny) -> None:
    served = tiny.load(graphs="eager", pattern=PATTERN)
    before = digest_tables(served.engine.runner.model.model)
    served.warmup()
    served.engine.generate(PROMPTS, GREEDY)
    assert digest_tables(served.engine.runner.model.model) == before
    assert any("inv_freq" in name for name in before)


def test_other_devices_have_no_such_mode(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="without launching them is a mode of hpu devices, got cpu"):
        tiny.load().warmup(compile_only=True)


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    monkeypatch.setenv("PT_HPU_WEIGHT_SHARING", "0")
    monkeypatch.setenv("PT_HPU_ENABLE_LAZY_COLLECTIVES", "true")
    monkeypatch.syspath_prepend(str(STANDIN))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "habana_frameworks"]:
        del sys.modules[name]


@pytest.mark.usefixtures("vendor")
def test_a_real_device_is_asked_for_the_bridges_own_mode() -> None:
    runtime = HabanaRuntime()
    bridge = importlib.import_module("habana_frameworks.torch.internal.bridge_config")
    with runtime.compile_only():
        assert bridge.SETTINGS["PT_COMPILE_ONLY_MODE"] is True
    assert not bridge.SETTINGS.get("PT_COMPILE_ONLY_MODE")
    assert runtime.used_bytes() == 300


@pytest.mark.usefixtures("vendor")
def test_what_a_lazy_device_collects_for_a_graph_is_built_inside_the_mode(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    buckets = BucketTable.from_strings(["csu/q16/s30/u48/l4", "--u/q4/s0/u48/l4"])
    served = tiny.load(graphs="eager", buckets=buckets)
    served.engine.runner.executor.runtime = HabanaRuntime(lazy=True)
    bridge = importlib.import_module("habana_frameworks.torch.internal.bridge_config")
    core = importlib.import_module("habana_frameworks.torch.core")
    marks: list[bool] = []
    monkeypatch.setattr(
        core, "mark_step", lambda: marks.append(bool(bridge.SETTINGS.get("PT_COMPILE_ONLY_MODE")))
    )
    assert served.warmup(compile_only=True).num_captured == 2
    # Tables are filled with the mode off, graphs are built with the mode on.
    assert marks == [False, False, True, True]

"""The engine on the simulated HPU's fused operators: the tokens of the CPU, with all rules kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from graphs import BucketTable
from hpu_duo import HPUDuoModel
from hpu_duo.lab import sim
from hpu_duo.lab.sim import fused
from hpu_duo.modeling.fused_modules import FusedRMSNorm
from hpu_duo.sampling import SamplingParams
from kernels_ref import FusedOperators, Implementation
from kernels_ref.hpu.attention import ATTENTION, BLOCK_SOFTMAX, LINE_BYTES, SOFTMAX
from tests.engine.tiny import PATTERN, Tiny, tokens_of
from tests.modeling.families import FAMILIES, IS_5, Zoo, greedy, prompts_of, save_random
from tests.sim.workload import LIMITS, Workload
from tests.tiers import crossed, further

pytestmark = pytest.mark.usefixtures("simulated_hpu", "default_buckets")

ALL_OPERATORS = (ATTENTION, SOFTMAX, BLOCK_SOFTMAX)
NORM, ROTARY = "rms_norm", "rotary_pos_embedding"


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Calls of fused operators inside the context."""
    calls: Counter[str] = Counter()
    run = sim.SimulatedHpu.run

    def counting(self: sim.SimulatedHpu, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "hpu":
            calls[func._schema.name.partition("::")[2]] += 1
        return run(self, func, args, kwargs)

    device = sim.install()
    with monkeypatch.context() as patch:
        patch.setattr("hpu_duo.lab.sim.tensor._dispatch", [lambda *args: counting(device, *args)])
        yield calls


def specs_of(served: HPUDuoModel) -> set[tuple[Implementation, FusedOperators]]:
    return {(spec.impl, spec.operators) for spec in served.engine.runner.model.specs}


def impls_of(served: HPUDuoModel) -> set[Implementation]:
    return {impl for impl, _ in specs_of(served)}


@pytest.mark.parametrize("name", [*further("GAUDI2"), "GAUDI3"])
def test_requests_get_the_tokens_of_the_cpu_without_anything_new_after_warm_up(tiny: Tiny, name: str) -> None:
    work = Workload.random(24, seed=4)
    with fused.named(name):
        served = tiny.load(device="hpu-sim", attention="hpu", pattern=PATTERN, **LIMITS)
        line_bytes = LINE_BYTES if name == "GAUDI3" else 0
        operators = FusedOperators(True, True, True, line_bytes, row_attention=True)
        assert specs_of(served) == {(Implementation.HPU, operators)}
        runner = served.engine.runner
        served.warmup()
        with sim.watch() as seen:
            done = work.run(served)
    report = seen.report()
    assert (report.new_graphs, report.new_recipes) == (0, 0)
    assert not report.excused
    assert report.max_reads == 1
    on_cpu = tiny.load(device="cpu", pattern=PATTERN, buckets=runner.graphs.table, **LIMITS)
    assert work.run(on_cpu) == done


def test_auto_is_fused_where_operators_pass_and_reference_is_what_it_says(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = prompts_of([9, 13]), SamplingParams(temperature=0, max_tokens=3)
    done = {}
    for attention in ("auto", "hpu", "reference"):
        served = tiny.load(device="hpu-sim", attention=attention, pattern=PATTERN)
        assert impls_of(served) == {
            Implementation.REFERENCE if attention == "reference" else Implementation.HPU
        }
        with counted(monkeypatch) as calls:
            done[attention] = tokens_of(served.engine.generate(prompts, params))
        expected = set() if attention == "reference" else {*ALL_OPERATORS, NORM, ROTARY}
        assert set(calls) == expected
    assert done["auto"] == done["hpu"] == done["reference"]


def test_without_a_working_operator_hpu_is_refused_and_auto_says_why(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("synStatus 26")

    for name in ALL_OPERATORS:
        monkeypatch.setattr(torch.ops.hpu, name, fails)
    with pytest.raises(
        ValueError, match="none of its operators passes: sdpa_recomp_fwd: synStatus 26; softmax"
    ):
        tiny.load(device="hpu-sim", attention="hpu")
    assert impls_of(tiny.load(device="hpu-sim", attention="auto")) == {Implementation.REFERENCE}
    assert "portable implementation: sdpa_recomp_fwd: synStatus 26" in caplog.text


def test_hpu_does_without_operators_that_fail(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.ops.hpu, ATTENTION, lambda *args: args[:4])
    served = tiny.load(device="hpu-sim", attention="hpu", pattern=PATTERN)
    assert {operators.names for _, operators in specs_of(served)} == {(SOFTMAX, BLOCK_SOFTMAX)}
    assert f"does without some of its operators: {ATTENTION}: " in caplog.text


@pytest.mark.slow
def test_compiled_code_of_one_kind_of_device_is_not_reused_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    fused.register()

    def padded_maxima(scores: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        return torch.ops.hpu.block_softmax(scores, torch.zeros(3, 1, 1, 1, 4), owner)[1][:, :2] + 1

    scores, owner = torch.zeros(3, 2, 1, 1, 4), torch.zeros(3, dtype=torch.int32)
    with torch.no_grad():
        for name in ("GAUDI2", "GAUDI3"):
            torch._dynamo.reset()
            with fused.named(name):
                made = torch.compile(padded_maxima)(scores, owner)
            assert made.shape == (3, 2), name


def test_it_is_made_for_a_gaudi(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="needs operators of a Gaudi, got device 'cpu'"):
        tiny.load(device="cpu", attention="hpu")


FUSED = {
    "llama": {NORM, ROTARY},
    "qwen3": {NORM, ROTARY},
    "phi3": {NORM, ROTARY},
    "granite": {NORM, ROTARY},
    "mistral_sliding": {NORM, ROTARY},
    "gemma2": {ROTARY},
    "starcoder2": {ROTARY},
    "phi": {ROTARY},
    "gpt_oss": {NORM},
    "cohere": set(),
}
"""Modules that each family computes plainly: Gemma's norm adds one to its weight, Cohere turns neighbours."""


MISSING = {"gemma2": {ATTENTION}, "mistral_sliding": {BLOCK_SOFTMAX}}
"""Between a product and its softmax, one operator has no place for a soft cap.
Rings are no blocks, and in a step without prompts one operator computes their whole attention."""


@pytest.mark.skipif(not IS_5, reason="gpt-oss has shapes that depend on the routing before 5")
@pytest.mark.parametrize(
    "family", crossed(list(FUSED), fast=("llama", "gemma2", "gpt_oss", "cohere", "mistral_sliding"))
)
def test_families_are_fused_where_they_are_plain_and_get_the_tokens_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FAMILIES[family]()
    model = save_random(config, tmp_path, seed=1)
    prompts, params = prompts_of([19, 6], seed=6), SamplingParams(temperature=0, max_tokens=4)
    sizes: dict[str, Any] = {"block_size": 8, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    most = 0 if family == "mistral_sliding" else 8
    table = BucketTable.from_strings([f"--u/q2/s0/u{most}/l2", f"csu/q16/s{most}/u{most}/l2"])
    served = HPUDuoModel.from_pretrained(
        tmp_path,
        device="hpu-sim",
        attention="hpu",
        dtype="float32",
        max_model_len=32,
        buckets=table,
        **sizes,
    )
    with counted(monkeypatch) as calls, sim.watch() as seen:
        done = served.engine.generate(prompts, params)
    assert not seen.report().excused
    assert set(calls) == {*ALL_OPERATORS, *FUSED[family]} - MISSING.get(family, set())
    expected = [greedy(model, prompt, 4) for prompt in prompts]
    assert [samples for (samples,) in tokens_of(done)] == expected


def test_a_norm_that_changes_what_it_computes_is_kept(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = zoo.load("llama")
    norm = torch.ops.hpu.rms_norm
    monkeypatch.setattr(torch.ops.hpu, NORM, lambda x, weight, epsilon: norm(x, weight + 1, epsilon))
    served = HPUDuoModel.from_pretrained(path, device="hpu-sim", attention="hpu", dtype="float32", **LIMITS)
    assert not any(isinstance(module, FusedRMSNorm) for module in served.engine.runner.model.model.modules())


@pytest.mark.parametrize("softmax", ["exact", "fast"])
def test_bfloat16_stays_close_to_the_reference(tiny: Tiny, softmax: str) -> None:
    prompts = prompts_of([9, 40], seed=3)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=8)
    found = []
    for attention in ("reference", "hpu"):
        served = tiny.load(device="hpu-sim", attention=attention, softmax=softmax, dtype="bfloat16")
        scale = 128.0 if softmax == "fast" and attention == "hpu" else 1.0
        assert {operators.inverse_scale for _, operators in specs_of(served)} == {scale}
        done = served.engine.generate(prompts, params)
        found.append([completion.logprobs[0].top for (completion,) in done])
    for mine, theirs in zip(*found, strict=True):
        both = {token: (mine[token], theirs[token]) for token in mine if token in theirs}
        assert len(both) >= 6
        assert all(abs(a - b) < 0.1 for a, b in both.values())

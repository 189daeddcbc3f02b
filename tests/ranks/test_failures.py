"""A rank that dies, hangs or differs ends the engine with an error that names it; nothing is half-served."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from hpu_duo.device.ranks import RankError
from hpu_duo.engine.orders import Order
from hpu_duo.engine.outputs import RequestOutput
from hpu_duo.llm import HPUDuoModel
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup.ranks import LedRanks, OwnLaunch
from tests.modeling.families import BLOCK, Zoo, prompts_of
from tests.ranks.work import Hang, HangInWarmUp, Nap

ROOT = Path(__file__).parents[2]
LONG = SamplingParams(max_tokens=150, temperature=0)


def load(zoo: Zoo, **changes: object) -> HPUDuoModel:
    options = {"dtype": "float32", "block_size": BLOCK, "num_blocks": 64, "max_num_seqs": 4, **changes}
    return HPUDuoModel.from_pretrained(zoo.load("llama")[1], tensor_parallel_size=2, **options)  # type: ignore[arg-type]


@pytest.fixture
def _known_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks read no object of a module that they have not loaded; these load the orders of the test."""
    (tmp_path / "sitecustomize.py").write_text("import tests.ranks.work\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")


def ranks_of(model: HPUDuoModel) -> LedRanks:
    followers = model.engine.runner.executor.followers
    assert isinstance(followers, LedRanks)
    return followers


def processes_of(model: HPUDuoModel) -> tuple[BaseProcess, ...]:
    launch = ranks_of(model).launch
    assert isinstance(launch, OwnLaunch)
    return launch.processes


def step_on(model: HPUDuoModel, outputs: list[RequestOutput]) -> None:
    """Step until an error, and collect what comes before it."""
    while True:
        outputs += model.engine.step()


def test_a_killed_rank_is_named_and_ends_the_engine(zoo: Zoo) -> None:
    model = load(zoo)
    expected = model.engine.generate(prompts_of()[:2], SamplingParams(max_tokens=4, temperature=0))
    assert all(len(each[0].token_ids) == 4 for each in expected)
    request = model.engine.add_request(prompts_of()[0], LONG)
    outputs = model.engine.step()
    [process] = processes_of(model)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 ended with exit code -9; all ranks have ended"):
        step_on(model, outputs)
    with pytest.raises(RankError, match="rank 1"):
        model.engine.step()
    assert all(output.finish_reason is None for output in outputs if output.request_id == request)
    ranks_of(model).stop()
    # Another engine may follow in the same process.
    other = load(zoo)
    again = other.engine.generate(prompts_of()[:2], SamplingParams(max_tokens=4, temperature=0))
    assert [each[0].token_ids for each in again] == [each[0].token_ids for each in expected]
    # Its ranks end with it.
    [process] = processes_of(other)
    del other
    process.join(20)
    assert process.exitcode is not None


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(zoo, rank_timeout_s=3.0)
    model.engine.add_request(prompts_of()[0], LONG)
    model.engine.step()
    [process] = processes_of(model)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(RankError, match=r"rank 1 sent no heartbeat for [34] s; all ranks have ended"):
        step_on(model, [])
    ranks_of(model).stop()
    assert not process.is_alive()


@pytest.mark.slow
@pytest.mark.usefixtures("_known_orders")
@pytest.mark.parametrize(
    ("order", "named"),
    [
        (HangInWarmUp(None), "rank 1 hangs: rank 0 waited for it in vain"),  # type: ignore[arg-type]
        pytest.param(
            Hang(), r"rank 1 hangs: it has been at an order for [23] s", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_rank_that_lives_and_hangs_is_named(zoo: Zoo, order: Order, named: str) -> None:
    model = load(zoo, rank_timeout_s=2.0)
    ranks_of(model).tell(order)
    model.engine.add_request(prompts_of()[0], LONG)
    with pytest.raises(RankError, match=named):
        step_on(model, [])
    ranks_of(model).stop()


@pytest.mark.slow
@pytest.mark.usefixtures("_known_orders")
def test_a_rank_that_lives_and_does_not_end_its_step_is_named_before_exchanges_time_out(zoo: Zoo) -> None:
    model = load(zoo, rank_timeout_s=2.0)
    model.engine.add_request(prompts_of()[0], LONG)
    model.engine.step()
    ranks_of(model).tell(Nap(None))  # type: ignore[arg-type]
    with pytest.raises(
        RankError, match=r"rank 1 hangs: it has been at an order for [23] s; all ranks have ended"
    ):
        step_on(model, [])
    ranks_of(model).stop()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ranks_end_when_rank_0_is_killed(zoo: Zoo, tmp_path: Path) -> None:
    script = tmp_path / "lead.py"
    script.write_text(
        "import time\n"
        "from hpu_duo.llm import HPUDuoModel\n"
        "if __name__ == '__main__':\n"
        f"    model = HPUDuoModel.from_pretrained({str(zoo.load('llama')[1])!r}, tensor_parallel_size=2,\n"
        f"        block_size={BLOCK}, num_blocks=64)\n"
        "    print(model.engine.runner.executor.followers.launch.processes[0].pid, flush=True)\n"
        "    time.sleep(600)\n",
        encoding="utf-8",
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        follower = int(leader.stdout.readline())
        leader.kill()
    end = time.monotonic() + 60
    while time.monotonic() < end and Path(f"/proc/{follower}").exists():
        time.sleep(0.1)
    assert not Path(f"/proc/{follower}").exists()


def test_what_cannot_be_shared_is_refused_before_processes_start(zoo: Zoo) -> None:
    with pytest.raises(ValueError, match="'gptj' cannot be served by several ranks"):
        HPUDuoModel.from_pretrained(zoo.load("gptj")[1], tensor_parallel_size=2)
    with pytest.raises(
        ValueError, match="num_attention_heads to be a multiple of tensor_parallel_size=3, got 4"
    ):
        HPUDuoModel.from_pretrained(zoo.load("llama")[1], tensor_parallel_size=3, block_size=BLOCK)
    with pytest.raises(ValueError, match="tensor_parallel_size to be an integer >= 1, got 0"):
        HPUDuoModel.from_pretrained(zoo.load("llama")[1], tensor_parallel_size=0)

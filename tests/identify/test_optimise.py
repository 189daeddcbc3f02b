"""Training gates: what it finds, and that nothing but the request decides the result."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.cli.app import app
from hpu_duo.heads import HeadPattern
from hpu_duo.lab.identify import (
    Band,
    BuiltinHaystack,
    DatasetSettings,
    Encoder,
    Form,
    FullFrom,
    GatedModel,
    GateTraining,
    LossForm,
    PasskeyDataset,
    Schedule,
    TrainingSettings,
    Workers,
)
from hpu_duo.lab.identify.run_state import STATE_FILE
from tests.identify.conftest import CPU
from tests.identify.induction import INDUCTION_HEAD
from tests.modeling.families import Zoo
from tests.tiers import every, further

BAND = Band(4, 24)
SHORT = TrainingSettings(Schedule(num_steps=6), batch_size=2, save_every=2)

Make = Callable[..., GateTraining]


@pytest.fixture
def make(induction_model: GatedModel, small_dataset: PasskeyDataset, tmp_path: Path) -> Make:
    def training(settings: TrainingSettings = SHORT, run: dict | None = None) -> GateTraining:
        return GateTraining(
            induction_model, small_dataset, BAND, settings, run or {"seed": 1}, tmp_path, Workers()
        )

    return training


@pytest.fixture
def state_file(tmp_path: Path) -> Path:
    return tmp_path / STATE_FILE


@pytest.mark.parametrize(
    ("loss", "full_from"), [(LossForm.MEAN, FullFrom.TEACHER), *further((LossForm.SUM, FullFrom.OWN))]
)
def test_a_hand_built_induction_head_is_ranked_first(make: Make, loss: LossForm, full_from: FullFrom) -> None:
    training = make(TrainingSettings(Schedule(num_steps=30), loss=loss, full_from=full_from))
    for _ in training.run():
        pass
    gates = training.gates.copy()
    assert gates[INDUCTION_HEAD] > 0.8
    gates[INDUCTION_HEAD] = 0
    assert gates.max() < 0.65


def test_at_the_start_there_is_no_distance_and_the_penalty_alone_moves_the_gates(make: Make) -> None:
    training = make()
    first = next(training.run())
    assert first.distillation == 0
    assert first.total == pytest.approx(0.05 * 1.0)
    np.testing.assert_allclose(training.gates, 1 - 0.02 * max(1 / (6 / 5), 0.1), rtol=1e-6)


def test_without_a_penalty_nothing_moves(make: Make) -> None:
    training = make(replace(SHORT, penalty_weight=0.0))
    for _ in training.run():
        pass
    assert (training.gates == 1).all()


def test_gates_of_heads_that_stream_anyway_move_by_the_penalty_alone(make: Make) -> None:
    training = make(TrainingSettings(Schedule(num_steps=4)))
    for _ in training.run():
        pass
    others = np.delete(training.gates.ravel(), np.ravel_multi_index(INDUCTION_HEAD, training.gates.shape))
    np.testing.assert_allclose(others, others[0], rtol=1e-4)


@pytest.mark.parametrize("steps_before", [1, *further(2, 3), 5])
def test_a_run_killed_at_any_step_ends_with_the_same_gates(
    make: Make, state_file: Path, steps_before: int
) -> None:
    straight = make()
    losses = list(straight.run())
    state_file.unlink()
    killed = make().run()
    for _ in range(steps_before):
        next(killed)
    # What a kill leaves is the last state on disk, every second step here.
    resumed = make()
    assert resumed.resume() is (steps_before >= 2)
    assert resumed.num_steps_done == steps_before // 2 * 2
    rest = list(resumed.run())
    assert resumed.gates.tobytes() == straight.gates.tobytes()
    assert resumed.losses == tuple(losses)
    assert rest == losses[steps_before // 2 * 2 :]


def test_the_state_of_another_run_is_refused_and_kept(make: Make, state_file: Path) -> None:
    next(make(run={"seed": 2}).run())
    make(run={"seed": 2}).save()
    before = state_file.read_bytes()
    with pytest.raises(ValueError, match="belongs to another run: seed differ; expected seed=1, got 2"):
        make().resume()
    assert state_file.read_bytes() == before


def test_a_batch_is_the_average_of_its_documents(
    induction_model: GatedModel, encoder: Encoder, tmp_path: Path
) -> None:
    settings = DatasetSettings(
        min_length=120, max_length=120, num_lengths=1, num_passkeys=2, passkey_words=3, form=Form.NAMES
    )
    dataset = PasskeyDataset(settings, BuiltinHaystack(), encoder)
    start = replace(SHORT, initial=0.5, penalty_weight=0.0)

    def first_losses(batch_size: int) -> list[float]:
        # Gates as good as still, so that later documents meet the first ones' gates.
        frozen = replace(start, batch_size=batch_size, schedule=Schedule(1e-12, 6))
        training = GateTraining(induction_model, dataset, BAND, frozen, {}, tmp_path, Workers())
        return [one.distillation for one in training.run()]

    apart = first_losses(1)
    assert first_losses(3)[0] == pytest.approx(np.mean(apart[:3]), rel=1e-6)


def test_a_batch_that_does_not_divide_among_processes_is_refused(
    induction_model: GatedModel, small_dataset: PasskeyDataset, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="a batch that 4 processes divide, got 2 texts"):
        GateTraining(induction_model, small_dataset, BAND, SHORT, {}, tmp_path, Workers(0, 4))


def test_a_model_whose_layers_all_have_short_windows_is_refused(
    zoo: Zoo, encoder: Encoder, tmp_path: Path
) -> None:
    _, directory = zoo.load("mistral_sliding")
    gated = GatedModel.load(directory, "float32", CPU)
    dataset = PasskeyDataset(DatasetSettings(), BuiltinHaystack(), encoder)
    with pytest.raises(ValueError, match="every layer has a sliding window shorter than max_length"):
        GateTraining(gated, dataset, BAND, SHORT, {}, tmp_path, Workers())


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("launcher", every(2, ["own", "torchrun"]))
def test_two_processes_find_the_gates_of_one(induction_dir: Path, tmp_path: Path, launcher: str) -> None:
    """Started by us or by torchrun, with the same global batch: bit by bit, as texts are summed in order."""
    arguments = (
        *("identify", "--model", induction_dir, "--form", "names", "--min-length", 120, "--max-length", 180),
        *("--num-passkeys", 2, "--passkey-words", 3, "--sink", 4, "--recent", 24, "--threads", 1),
        *("--steps", 3, "--batch-size", 2, "--device", "cpu"),
    )
    one, two = tmp_path / "one", tmp_path / "two"
    runs = ((one, ()), (two, ("--num-processes", 2)))
    for output, more in runs if launcher == "own" else runs[:1]:
        command = [str(word) for word in (*arguments, "--output", output, *more, "--json")]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["output"] == str(output)
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
        command = [str(word) for word in (*torchrun, "-m", "hpu_duo.cli", *arguments, "--output", two)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    for name in ("full_attention_heads.tsv", "losses.tsv", "config.json", "heads.png"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


@pytest.mark.slow
def test_the_builtin_models_retrieval_heads_are_found(encoder: Encoder, tmp_path: Path) -> None:
    settings = DatasetSettings(
        min_length=256, max_length=320, num_passkeys=4, passkey_words=5, form=Form.NAMES, seed=3
    )
    training = GateTraining(
        GatedModel.load(MODEL_DIR, "float32", CPU),
        PasskeyDataset(settings, BuiltinHaystack(), encoder),
        Band(16, 64),
        TrainingSettings(Schedule(lr=0.08, num_steps=20)),
        {},
        tmp_path,
        Workers(),
    )
    for _ in training.run():
        pass
    found = HeadPattern(training.gates, 16, 64).binarise(sparsity=0.75).mask
    assert {(int(layer), int(head)) for layer, head in np.argwhere(found)} == {(1, 0), (1, 2), (2, 1), (2, 3)}

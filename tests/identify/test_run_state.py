"""The state file: exact, whole or refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.lab.identify.objective import AdamState
from hpu_duo.lab.identify.run_state import STATE_FILE, RunState, StepLosses, read_state, write_state

RUN = {"lr": 0.02, "form": "names", "seed": 1}


def state(step: int = 2) -> RunState:
    rng = np.random.default_rng(0)
    gates, mean, square = rng.random((3, 2, 4)) * 1e-3
    losses = tuple(StepLosses(i + 1, *map(float, rng.random(3))) for i in range(step))
    return RunState(RUN, AdamState(step, gates, mean, square), losses)


def test_a_state_comes_back_bit_by_bit(tmp_path: Path) -> None:
    write_state(state(), tmp_path)
    back = read_state(tmp_path, RUN)
    assert back is not None
    for name in ("gates", "mean", "square"):
        assert getattr(back.adam, name).tobytes() == getattr(state().adam, name).tobytes()
    assert (back.adam.step, back.losses) == (2, state().losses)
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]


def test_without_a_file_there_is_no_state(tmp_path: Path) -> None:
    assert read_state(tmp_path, RUN) is None


def test_another_run_is_refused_with_what_differs_and_left_alone(tmp_path: Path) -> None:
    write_state(state(), tmp_path)
    before = (tmp_path / STATE_FILE).read_bytes()
    with pytest.raises(ValueError, match=r"lr, seed differ; expected lr=0.01, got 0.02"):
        read_state(tmp_path, {**RUN, "lr": 0.01, "seed": 2})
    assert (tmp_path / STATE_FILE).read_bytes() == before


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_half_written_file_is_refused_wherever_it_ends(
    tmp_path_factory: pytest.TempPathFactory, share: float
) -> None:
    directory = tmp_path_factory.mktemp("state")
    write_state(state(), directory)
    path = directory / STATE_FILE
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match="is damaged or half-written"):
        read_state(directory, RUN)
    assert len(path.read_bytes()) == int(len(data) * share)


def test_a_file_with_another_number_in_it_is_refused(tmp_path: Path) -> None:
    write_state(state(), tmp_path)
    path = tmp_path / STATE_FILE
    fields = json.loads(path.read_text())
    fields["gates"][0][0] += 1e-9
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="its checksum does not fit"):
        read_state(tmp_path, RUN)


@pytest.mark.parametrize("text", ["[]", '{"format": "another"}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(ValueError, match="is no state of this program"):
        read_state(tmp_path, RUN)

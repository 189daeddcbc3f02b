"""State of an optimisation, in a file that is whole even if the process is killed at any moment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from graphs.atomic_file import replace_file
from hpu_duo.lab.identify.objective import AdamState

STATE_FILE = "identify_state.json"
_FORMAT = "hpu-duo identify, 1"


@dataclass(frozen=True)
class StepLosses:
    """Losses of one step, averaged over its texts.

    Attributes:
        step: steps done with it.
        distillation: distance to the unchanged model.
        penalty: L1 of the gates, before its weight.
        total: the loss that was minimised.
    """

    step: int
    distillation: float
    penalty: float
    total: float


@dataclass(frozen=True)
class RunState:
    """All that the rest of a run depends on, besides its settings.

    Attributes:
        run: settings, as JSON values; the state of a run fits no other one.
        adam: gates and moments.
        losses: of every step so far.
    """

    run: Mapping[str, Any]
    adam: AdamState
    losses: tuple[StepLosses, ...] = field(default=())


def write_state(state: RunState, directory: Path) -> None:
    """Write the state file, whole or not at all."""
    adam = state.adam
    fields: dict[str, Any] = {
        "format": _FORMAT,
        "run": dict(state.run),
        "step": adam.step,
        "gates": adam.gates.tolist(),
        "mean": adam.mean.tolist(),
        "square": adam.square.tolist(),
        "losses": [[one.distillation, one.penalty, one.total] for one in state.losses],
    }
    fields["checksum"] = _checksum(fields)
    replace_file(directory / STATE_FILE, json.dumps(fields))


def read_state(directory: Path, run: Mapping[str, Any]) -> RunState | None:
    """The state of ``run``, or None when there is no file.

    Raises:
        ValueError: the file is damaged, or belongs to another run; it is left as it is.
    """
    path = directory / STATE_FILE
    if not path.is_file():
        return None
    fields = _read(path)
    _check_same_run(path, fields["run"], json.loads(json.dumps(run)))
    gates, mean, square = (np.array(fields[name], dtype=np.float64) for name in ("gates", "mean", "square"))
    losses = tuple(StepLosses(index + 1, *one) for index, one in enumerate(fields["losses"]))
    return RunState(run, AdamState(fields["step"], gates, mean, square), losses)


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(
            f"{path} is damaged or half-written: expected JSON; move it away to start anew"
        ) from None
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise ValueError(f"{path} is no state of this program: expected the format {_FORMAT!r}")
    stored = fields.pop("checksum", None)
    if stored != _checksum(fields):
        raise ValueError(
            f"{path} is damaged or half-written: its checksum does not fit; move it away to start anew"
        )
    return fields


def _check_same_run(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    different = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
    if different:
        key = different[0]
        raise ValueError(
            f"{path} belongs to another run: {', '.join(different)} differ; "
            f"expected {key}={wanted.get(key)!r}, got {found.get(key)!r}"
        )


def _checksum(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

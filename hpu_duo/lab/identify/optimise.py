"""Identification by optimisation: gates learn which KV heads can do without the whole context.

Source: Xiao et al. 2024, DuoAttention (arXiv:2410.10819).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpu_duo.lab.identify.attention import Band
from hpu_duo.lab.identify.dataset import PasskeyDataset
from hpu_duo.lab.identify.gated_model import FullFrom, GatedModel
from hpu_duo.lab.identify.objective import AdamState, Gates, LossForm, Schedule, to_tensor
from hpu_duo.lab.identify.run_state import RunState, StepLosses, read_state, write_state
from hpu_duo.lab.identify.workers import Workers


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of the training of gates; the defaults are those of the published code.

    Attributes:
        schedule: steps and learning rates.
        penalty_weight: factor of the L1 of the gates.
        loss: mean (the code's) or sum (the paper's).
        full_from: the model whose full attention a gate mixes in.
        batch_size: texts of a step, over all processes.
        initial: gates before the first step.
        save_every: steps between two states on disk.
    """

    schedule: Schedule = field(default_factory=Schedule)
    penalty_weight: float = 0.05
    loss: LossForm = LossForm.MEAN
    full_from: FullFrom = FullFrom.TEACHER
    batch_size: int = 1
    initial: float = 1.0
    save_every: int = 50

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.save_every < 1:
            raise ValueError(
                f"expected batch_size and save_every of at least 1, got {self.batch_size} and "
                f"{self.save_every}"
            )
        if not 0 <= self.initial <= 1 or not self.penalty_weight >= 0:
            raise ValueError(
                f"expected initial in [0, 1] and penalty_weight >= 0, got {self.initial} and "
                f"{self.penalty_weight}"
            )


class GateTraining:
    """One run of the optimisation: owns its state, in memory and on disk.

    Args:
        model: frozen; gets one gate for each KV head.
        dataset: text ``i`` of step ``s`` is its document ``s * batch_size + i``.
        band: keys that streaming heads see.
        settings: of the training.
        run: description of the run, as JSON values; the state on disk must match it.
        directory: of the state on disk.
        workers: processes that share each batch.

    Raises:
        ValueError: the batch does not divide among the processes, or no layer could have gates.
    """

    def __init__(
        self,
        model: GatedModel,
        dataset: PasskeyDataset,
        band: Band,
        settings: TrainingSettings,
        run: Mapping[str, Any],
        directory: Path,
        workers: Workers,
    ) -> None:
        self._model, self._dataset, self._band, self._settings = model, dataset, band, settings
        self._directory, self._workers = directory, workers
        self._share = workers.share(settings.batch_size)
        self._gated = model.gated_layers(dataset.settings.max_length)
        if not any(self._gated):
            raise ValueError(
                "expected a model with at least one layer that attends to the whole context; "
                "every layer has a sliding window shorter than max_length"
            )
        gates = np.full((model.num_layers, model.num_kv_heads), settings.initial)
        gates[~np.array(self._gated)] = 0.0
        self._state = RunState(dict(run), AdamState.initial(gates))

    @property
    def gates(self) -> Gates:
        """Gates ``[L, K]``; those of layers without are 0, since such layers stream."""
        return self._state.adam.gates

    @property
    def losses(self) -> tuple[StepLosses, ...]:
        """Losses of every step so far."""
        return self._state.losses

    @property
    def num_steps_done(self) -> int:
        """Steps so far."""
        return self._state.adam.step

    def resume(self) -> bool:
        """Go on from the state on disk; False when there is none, ValueError when it is of another run."""
        found = read_state(self._directory, self._state.run)
        if found is not None:
            self._state = found
        return found is not None

    def save(self) -> None:
        """Write the state, in the first process."""
        if self._workers.is_first:
            write_state(self._state, self._directory)

    def run(self) -> Iterator[StepLosses]:
        """Take the remaining steps, saving on the way; yields after each."""
        schedule, every = self._settings.schedule, self._settings.save_every
        while self.num_steps_done < schedule.num_steps:
            self._step()
            if self.num_steps_done % every == 0 or self.num_steps_done == schedule.num_steps:
                self.save()
            yield self.losses[-1]

    def _step(self) -> None:
        settings, adam = self._settings, self._state.adam
        first = adam.step * settings.batch_size
        rows = [self._learn(first + index) for index in self._share]
        gathered = self._workers.gather(np.stack(rows))
        distillation = float(gathered[:, 0].mean())
        gradient = gathered[:, 1:].mean(axis=0).reshape(adam.gates.shape)
        penalty, slope = settings.loss.penalty(adam.gates, np.array(self._gated))
        total = distillation + settings.penalty_weight * penalty
        moved = adam.stepped(gradient + settings.penalty_weight * slope, settings.schedule.at(adam.step))
        losses = StepLosses(moved.step, distillation, penalty, total)
        self._state = replace(self._state, adam=moved, losses=(*self._state.losses, losses))

    def _learn(self, index: int) -> NDArray[np.float64]:
        """Loss of one document and its gradient, in one row ``[1 + L * K]``."""
        sample = self._dataset.sample(index)
        ids = torch.from_numpy(sample.ids)
        positions = torch.from_numpy(sample.labelled).to(self._model.device)
        settings = self._settings
        gates = to_tensor(self.gates, self._model.device)
        taught = self._model.teach(ids, positions, self._gated, settings.full_from)
        attention = taught.attention if settings.full_from is FullFrom.TEACHER else None
        hidden = self._model.gated_hidden(ids, positions, gates, self._gated, self._band, attention)
        loss = settings.loss.distillation(hidden, taught.hidden)
        (gradient,) = torch.autograd.grad(loss, [gates])
        row = np.concatenate([[loss.item()], gradient.double().cpu().numpy().ravel()])
        if not np.isfinite(row).all():
            raise FloatingPointError(
                f"the loss of document {index} or its gradient is not finite; "
                "try float32 or bfloat16 instead of float16"
            )
        return row

"""From a checkpoint to a head pattern: the methods, their settings, and the files they write."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from graphs.atomic_file import replace_file
from hpu_duo.device import resolve_device
from hpu_duo.heads import HeadPattern
from hpu_duo.heads.pattern import CONFIG_FILE, FINGERPRINT_KEY, NAME_KEY, SCORES_FILE
from hpu_duo.lab.identify.attention import Band
from hpu_duo.lab.identify.dataset import DatasetSettings, PasskeyDataset
from hpu_duo.lab.identify.encoding import Encoder
from hpu_duo.lab.identify.gated_model import GatedModel, check_device
from hpu_duo.lab.identify.measure import (
    MEAN_QK_TOKENS,
    mean_qk_scores,
    measured,
    profile_scores,
    retrieval_scores,
)
from hpu_duo.lab.identify.objective import Gates
from hpu_duo.lab.identify.optimise import GateTraining, TrainingSettings
from hpu_duo.lab.identify.run_state import STATE_FILE, StepLosses
from hpu_duo.lab.identify.workers import Workers
from hpu_duo.lab.tasks.haystack import BuiltinHaystack, TextHaystack
from hpu_duo.modeling.hub import model_fingerprint, model_name
from hpu_duo.modeling.loading import load_tokenizer, read_config, resolve_dtype
from hpu_duo.writable import check_directory

LOSSES_FILE = "losses.tsv"
PICTURE_FILE = "heads.png"
"""Drawn by the command line."""


class Method(str, Enum):
    """Method of scoring heads."""

    OPTIMISE = "optimise"
    """Gates trained on the distance to the unchanged model."""
    PROFILE = "profile"
    """Attention that passkey tokens pay to keys outside of sink and recent tokens."""
    RETRIEVAL_SCORE = "retrieval-score"
    """Share of passkey tokens that a head attends to most in the step that copies them."""
    MEAN_QK = "mean-qk"
    """Reach of the mean query over mean keys, from positions alone."""


@dataclass(frozen=True)
class IdentifyRequest:
    """Settings of one run.

    Attributes:
        model: directory of a transformers checkpoint with a tokenizer.
        output: directory for the pattern; made if need be.
        method: the method of scoring heads.
        dataset: the documents.
        haystack: file of the filler text; None for the built-in text.
        sink, recent: tokens that streaming heads see.
        training: settings of ``OPTIMISE``.
        num_samples: texts of the other methods.
        dtype, device: of the model; see ``HPUDuoModel``.
        resume: continue the run whose files ``output`` holds.
    """

    model: Path
    output: Path
    method: Method = Method.OPTIMISE
    dataset: DatasetSettings = field(default_factory=DatasetSettings)
    haystack: Path | None = None
    sink: int = 128
    recent: int = 256
    training: TrainingSettings = field(default_factory=TrainingSettings)
    num_samples: int = 50
    dtype: str = "auto"
    device: str = "auto"
    resume: bool = False

    def __post_init__(self) -> None:
        if self.sink < 0 or self.recent < 1 or self.num_samples < 1:
            raise ValueError(
                f"expected sink >= 0, recent >= 1 and num_samples >= 1, got {self.sink}, {self.recent} and "
                f"{self.num_samples}"
            )
        check_device(self.device)


@dataclass(frozen=True)
class Progress:
    """Progress of a run: units done, units in all, and the losses of the last step where there are any."""

    done: int
    total: int
    losses: StepLosses | None = None


class Identification:
    """One run, checked and ready to go.

    Args:
        request: settings of the run.
        workers: processes that share the run.

    Raises:
        ValueError: something asked for cannot be done, or the output holds files that would be overwritten;
            nothing has been written then.
    """

    def __init__(self, request: IdentifyRequest, workers: Workers) -> None:
        _check_output(request)
        # Cheap checks first: a model of this size takes minutes to read.
        haystack = BuiltinHaystack() if request.haystack is None else TextHaystack.read(request.haystack)
        config = read_config(request.model)
        tokenizer = load_tokenizer(request.model)
        if tokenizer is None:
            raise ValueError(f"expected a tokenizer beside the model in {request.model}, found none")
        self._dataset = PasskeyDataset(request.dataset, haystack, Encoder(tokenizer))
        is_optimised = request.method is Method.OPTIMISE
        training = request.training
        self.total = training.schedule.num_steps if is_optimised else request.num_samples
        num_documents = self.total * training.batch_size if is_optimised else self.total
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        if request.method is Method.MEAN_QK:
            self._dataset.check_filler(MEAN_QK_TOKENS, positions)
        else:
            self._dataset.check(num_documents, positions)
        workers.share(training.batch_size if is_optimised else request.num_samples)

        device = workers.device(resolve_device(request.device))
        self._request, self._workers = request, workers
        self._model = GatedModel.load(request.model, request.dtype, device)
        self._band = Band(request.sink, request.recent)
        dtype = str(resolve_dtype(request.dtype, config)).removeprefix("torch.")
        self.config = _config_fields(request, dtype, self._dataset)
        self._scores: Gates | None = None
        self._training: GateTraining | None = None
        if is_optimised:
            self._training = GateTraining(
                self._model, self._dataset, self._band, training, self.config, request.output, workers
            )
            if request.resume:
                self._training.resume()

    @property
    def num_done(self) -> int:
        """Steps that were done before, in the run that this one resumes."""
        return 0 if self._training is None else self._training.num_steps_done

    @property
    def scores(self) -> Gates | None:
        """Scores as they are now, float64 ``[L, K]``; None before a measuring method has ended."""
        return self._scores if self._training is None else self._training.gates

    def run(self) -> Iterator[Progress]:
        """Do the remaining steps or samples, and yield the progress after each."""
        self._make_output()
        if self._training is not None:
            for losses in self._training.run():
                yield Progress(losses.step, self.total, losses)
            return
        request, dataset, model, band = self._request, self._dataset, self._model, self._band

        def score(index: int) -> Gates:
            if request.method is Method.PROFILE:
                return profile_scores(model, dataset, index, band)
            if request.method is Method.RETRIEVAL_SCORE:
                return retrieval_scores(model, dataset, index)
            return mean_qk_scores(model, dataset, index)

        for done, scores in measured(score, request.num_samples, self._workers):
            self._scores = scores
            yield Progress(done, self.total)

    def save_state(self) -> None:
        """Write the state of an optimisation, so that the run can be resumed from here."""
        if self._training is not None:
            self._training.save()

    def pattern(self) -> HeadPattern:
        """The pattern of a run that has ended."""
        assert self.scores is not None, "the run has not ended"
        request = self._request
        source = f"identified by {request.method.value}"
        return HeadPattern(self.scores, request.sink, request.recent, source, config=self.config)

    def write(self) -> None:
        """Write the pattern, and the losses of each step, in the first process."""
        if not self._workers.is_first:
            return
        output = self._request.output
        if self._training is not None:
            replace_file(output / LOSSES_FILE, _losses_table(self._training.losses))
        aside = output / ".partial"
        self.pattern().save(aside)
        for name in (CONFIG_FILE, SCORES_FILE):
            (aside / name).replace(output / name)
        shutil.rmtree(aside)

    def _make_output(self) -> None:
        if self._workers.is_first:
            self._request.output.mkdir(parents=True, exist_ok=True)
        self._workers.wait()


def _check_output(request: IdentifyRequest) -> None:
    output = request.output
    check_directory("the pattern's directory", output)
    has_state = (output / STATE_FILE).is_file()
    if request.resume and request.method is not Method.OPTIMISE:
        raise ValueError(f"expected --resume with the method 'optimise' only, got {request.method.value!r}")
    if has_state and not request.resume:
        raise ValueError(f"{output} holds a run already: go on with --resume, or choose another directory")
    if (output / SCORES_FILE).is_file() and not has_state:
        raise ValueError(f"{output} holds a head pattern already: choose another directory")
    # A checkpoint has a config.json too.
    taken = [name for name in (CONFIG_FILE, LOSSES_FILE, PICTURE_FILE) if (output / name).exists()]
    if taken and not has_state:
        raise ValueError(f"{output} holds {', '.join(taken)} already: choose another directory")


def _config_fields(request: IdentifyRequest, dtype: str, dataset: PasskeyDataset) -> dict[str, Any]:
    """config.json: the keys of the published files, and all settings that the scores depend on."""
    data = request.dataset
    fields: dict[str, Any] = {
        NAME_KEY: model_name(request.model),
        "method": request.method.value,
        "sink_size": request.sink,
        "recent_size": request.recent,
        "context_length_min": data.min_length,
        "context_length_max": data.max_length,
        "context_lengths_num_intervals": data.num_lengths,
        "depth_ratio_num_intervals": data.num_depths,
        "min_needle_depth_ratio": data.min_depth,
        "max_needle_depth_ratio": data.max_depth,
        "num_passkeys": data.num_passkeys,
        "passkey_length": data.passkey_words,
        "label_questions": data.label_questions,
        "form": data.form.value,
        "seed": data.seed,
        "dtype": dtype,
        FINGERPRINT_KEY: model_fingerprint(request.model),
        **{f"{key}_fingerprint": value for key, value in dataset.fingerprint().items()},
    }
    if request.method is not Method.OPTIMISE:
        return {**fields, "n_samples": request.num_samples}
    training = request.training
    return {
        **fields,
        "supervision": "distill",
        "loss": training.loss.value,
        "full_from": training.full_from.value,
        "reg_weight": training.penalty_weight,
        "initial_value": training.initial,
        "lr": training.schedule.lr,
        "ramp": training.schedule.ramp,
        "num_steps": training.schedule.num_steps,
        "batch_size": training.batch_size,
    }


def _losses_table(losses: tuple[StepLosses, ...]) -> str:
    rows = [f"{one.step}\t{one.distillation!r}\t{one.penalty!r}\t{one.total!r}\n" for one in losses]
    return "step\tdistillation\tpenalty\ttotal\n" + "".join(rows)

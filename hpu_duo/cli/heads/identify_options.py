"""Options of ``hpu-duo identify``, in groups, and the request that they describe."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.cli.options import option_in

if TYPE_CHECKING:
    from hpu_duo.lab.identify import DatasetSettings, IdentifyRequest, TrainingSettings

_data_option = option_in("Documents")
_heads_option = option_in("Heads")
_training_option = option_in("Training (method optimise)")
_run_option = option_in("Run")

Choice = TypeVar("Choice", bound=Enum)
Value = TypeVar("Value")


@dataclass(frozen=True)
class _Defaults:
    """Defaults that are others for the built-in model, which is small."""

    is_builtin: bool

    def pick(self, given: Value | None, general: Value, builtin: Value) -> Value:
        if given is not None:
            return given
        return builtin if self.is_builtin else general


@dataclass(frozen=True)
class DocumentOptions:
    """Documents that passkeys are hidden in."""

    haystack: Annotated[
        Path | None, _data_option("UTF-8 text that passkeys are hidden in.", show_default="built-in text")
    ] = None
    form: Annotated[
        str | None,
        _data_option(
            "How passkeys are worded: ordinals, or names, which the built-in model knows.",
            show_default="ordinals, or names with the built-in model",
        ),
    ] = None
    min_length: Annotated[
        int | None, _data_option("Tokens of the shortest document.", show_default="1000, or 512")
    ] = None
    max_length: Annotated[
        int | None,
        _data_option("Tokens of the longest document, without the questions.", show_default="32000, or 1024"),
    ] = None
    num_lengths: Annotated[int, _data_option("Distinct lengths between the two.")] = 50
    num_passkeys: Annotated[int | None, _data_option("Passkeys of a document.", show_default="10, or 8")] = (
        None
    )
    passkey_words: Annotated[int | None, _data_option("Words of a passkey.", show_default="32, or 8")] = None
    min_depth: Annotated[float, _data_option("Share of the text before the first passkey.")] = 0.05
    max_depth: Annotated[float, _data_option("Share of the text before the last one.")] = 0.95
    label_questions: Annotated[
        bool,
        typer.Option(
            "--label-questions", help="Count tokens of questions as well, as the published code does."
        ),
    ] = False
    samples: Annotated[
        int | None, _data_option("Documents of methods that do not train.", show_default="50, or 16")
    ] = None

    def settings(self, defaults: _Defaults, seed: int) -> DatasetSettings:
        """The documents; ValueError for sizes that make none."""
        from hpu_duo.lab.identify import DatasetSettings, Form

        return DatasetSettings(
            min_length=defaults.pick(self.min_length, 1000, 512),
            max_length=defaults.pick(self.max_length, 32000, 1024),
            num_lengths=self.num_lengths,
            num_passkeys=defaults.pick(self.num_passkeys, 10, 8),
            passkey_words=defaults.pick(self.passkey_words, 32, 8),
            min_depth=self.min_depth,
            max_depth=self.max_depth,
            label_questions=self.label_questions,
            form=choice(Form, "--form", self.form or defaults.pick(None, "ordinals", "names")),
            seed=seed,
        )


@dataclass(frozen=True)
class WindowOptions:
    """Tokens that streaming heads keep."""

    sink: Annotated[
        int | None, _heads_option("First tokens that streaming heads store.", show_default="128, or 16")
    ] = None
    recent: Annotated[
        int | None, _heads_option("Newest tokens that streaming heads store.", show_default="256, or 64")
    ] = None


@dataclass(frozen=True)
class TrainingOptions:
    """Training of the gates, one for each head."""

    steps: Annotated[int | None, _training_option("Optimiser steps.", show_default="2000, or 100")] = None
    batch_size: Annotated[int, _training_option("Documents of a step, over all processes.")] = 1
    lr: Annotated[float, _training_option("Peak learning rate.")] = 0.02
    reg_weight: Annotated[float, _training_option("Weight of the L1 of the gates.")] = 0.05
    loss: Annotated[
        str, _training_option("mean: averages, as the published code; sum: sums, as the paper.")
    ] = "mean"
    full_from: Annotated[
        str,
        _training_option(
            "Full attention that gates mix in: teacher's, as the published code; own, as the paper."
        ),
    ] = "teacher"
    save_every: Annotated[int, _training_option("Steps between two saved states.")] = 50
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume from the state in the output directory, if there is one."),
    ] = False

    def settings(self, defaults: _Defaults) -> TrainingSettings:
        """The training; ValueError for a value out of range."""
        from hpu_duo.lab.identify import FullFrom, LossForm, Schedule, TrainingSettings

        return TrainingSettings(
            schedule=Schedule(lr=self.lr, num_steps=defaults.pick(self.steps, 2000, 100)),
            penalty_weight=self.reg_weight,
            loss=choice(LossForm, "--loss", self.loss),
            full_from=choice(FullFrom, "--full-from", self.full_from),
            batch_size=self.batch_size,
            save_every=self.save_every,
        )


@dataclass(frozen=True)
class RunOptions:
    """Device and processes of a run."""

    seed: Annotated[int, _run_option("Fixes the documents.")] = 0
    device: Annotated[str, _run_option("auto, cpu, cuda or hpu.")] = "auto"
    dtype: Annotated[
        str,
        _run_option(
            "auto (the checkpoint's), float32, bfloat16 or float16.",
            show_default="auto, or float32 with the built-in model",
        ),
    ] = ""
    threads: Annotated[
        int | None, _run_option("CPU threads of a process.", show_default="torch's choice")
    ] = None
    num_processes: Annotated[
        int | None,
        _run_option(
            "Number of processes, each with a device of its own, that share the documents.",
            show_default="this one alone",
        ),
    ] = None

    def check(self) -> None:
        """Raise ValueError for a number of threads that there cannot be."""
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"expected --threads of at least 1, got {self.threads}")


def request_of(
    model: Path | None,
    output: Path,
    method: str,
    documents: DocumentOptions,
    window: WindowOptions,
    training: TrainingOptions,
    run: RunOptions,
) -> IdentifyRequest:
    """The request that the options describe.

    Args:
        model: None is the built-in one.

    Raises:
        ValueError: a value that is unknown or out of range.
    """
    from hpu_duo.lab.identify import IdentifyRequest, Method

    defaults = _Defaults(is_builtin=model is None)
    return IdentifyRequest(
        model=MODEL_DIR if model is None else model,
        output=output,
        method=choice(Method, "--method", method),
        dataset=documents.settings(defaults, run.seed),
        haystack=documents.haystack,
        sink=defaults.pick(window.sink, 128, 16),
        recent=defaults.pick(window.recent, 256, 64),
        training=training.settings(defaults),
        num_samples=defaults.pick(documents.samples, 50, 16),
        dtype=run.dtype or defaults.pick(None, "auto", "float32"),
        device=run.device,
        resume=training.resume,
    )


def choice(names: type[Choice], option: str, text: str) -> Choice:
    """The member of an enumeration that an option names; ValueError for another word."""
    known = [str(one.value) for one in names]
    if text not in known:
        raise ValueError(f"expected {option} to be one of {', '.join(known)}, got {text!r}")
    return names(text)

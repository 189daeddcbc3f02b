"""Options that the evaluations share, and the model that they describe."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.cli import options as opt
from hpu_duo.cli.options import Only, load_model, with_pattern
from hpu_duo.config.engine import SETTINGS
from hpu_duo.config.overrides import EngineOverrides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpu_duo.heads import HeadPattern
    from hpu_duo.lab.eval import PasskeyText, Subject
    from hpu_duo.lab.tasks.rehearsed import Rehearsals

MAX_NUM_SEQS = 8

Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Directory for the results; a killed run resumes from there.",
        show_default="nothing is written",
    ),
]
Directory = Annotated[
    Path,
    typer.Option(
        metavar="DIR",
        help="Directory for the results; a killed run resumes from there.",
    ),
]
NumDocuments = Annotated[int, typer.Option(help="Documents for each measurement.")]
NumPasskeys = Annotated[int, typer.Option(help="Passkeys of each document, with one question each.")]
PasskeyWords = Annotated[int, typer.Option(help="Words of each passkey.")]
NumRehearsals = Annotated[
    int | None,
    typer.Option(
        "--rehearsals",
        help="Times that each passkey is asked and answered in its document, before a tail without any.",
        show_default="no such documents",
    ),
]


@dataclass(frozen=True)
class TextOptions:
    """Texts that passkey documents are written with."""

    haystack: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 text to hide passkeys in.",
            show_default="sentences of the built-in language",
        ),
    ] = None
    words: Annotated[
        str | None,
        typer.Option(
            help="Words of passkeys: builtin; tokenizer, frequent whole words among the model's tokens; or "
            "vocabulary, all of these.",
            show_default="tokenizer, but builtin for the built-in model",
        ),
    ] = None

    def read(self, model: Path | None) -> PasskeyText:
        """The text and the kind of words, for a model or the built-in one.

        Raises:
            ValueError: the file cannot be read, or the words are of no known kind.
        """
        from hpu_duo.lab.eval import PasskeyText, WordSource
        from hpu_duo.lab.tasks.haystack import BuiltinHaystack, TextHaystack

        names = [source.value for source in WordSource]
        if self.words is not None and self.words not in names:
            raise ValueError(f"expected --words {', '.join(names[:-1])} or {names[-1]}, got {self.words!r}")
        default = WordSource.BUILTIN if model is None else WordSource.TOKENIZER
        return PasskeyText(
            BuiltinHaystack() if self.haystack is None else TextHaystack.read(self.haystack),
            default if self.words is None else WordSource(self.words),
        )


def rehearsed(num_rehearsals: int | None) -> Rehearsals | None:
    """Return the rehearsals of an option.

    Raises:
        ValueError: the number is negative.
    """
    from hpu_duo.lab.tasks.rehearsed import Rehearsals

    return None if num_rehearsals is None else Rehearsals(num_rehearsals)


_HELD = (*opt.STORED, "max_num_batched_tokens", "block_size", "device_memory_utilization")
_SIZES = (*_HELD, "max_model_len", *opt.KEPT, "attention_rule", "max_ring_window", "speculative_config")
# Texts do not depend on those before them: nothing is cached. Prompts are long: few at a time.
_EVALUATED: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": MAX_NUM_SEQS}
SCORED_LEN = 8
"""Tokens of an answer that are scored together."""
Engine = Annotated[EngineOverrides, Only(*opt.CUT, *opt.STEP, *_SIZES, **_EVALUATED)]
Scoring = Annotated[EngineOverrides, Only(*opt.CUT, *opt.STEP, *_SIZES, **_EVALUATED, decode_len=SCORED_LEN)]
"""Of evaluations that score given texts."""
WithoutHeads = Annotated[
    EngineOverrides, Only("sink", "recent", *opt.STEP, *_SIZES, **_EVALUATED, decode_len=SCORED_LEN)
]
"""Of evaluations that choose heads themselves."""
Compared = Annotated[EngineOverrides, Only(*opt.STEP, *_HELD, **_EVALUATED)]
OneText = Annotated[
    EngineOverrides,
    Only(*opt.CUT, *opt.STEP, *_SIZES, enable_prefix_caching=False, decode_len=SCORED_LEN),
]


_DECISIVE = (
    *("sparsity", "threshold", "sink", "recent", "max_layer_kinds", "dtype", "block_size", "kv_policy"),
    *("kv_budget", "kv_prompt", "kv_chunk", "max_model_len", "attention_rule", "max_ring_window"),
    *opt.STORED,
)
"""Settings, besides files, that results depend on."""


@dataclass(frozen=True)
class Choice:
    """Model and engine of an evaluation."""

    model: Path | None
    engine: EngineOverrides

    def settings(self) -> dict[str, object]:
        """Return the settings that the results depend on, for the first line of their file.

        Raises:
            ValueError: the model or the pattern cannot be read.
        """
        from hpu_duo.lab.eval.result_file import FINGERPRINT
        from hpu_duo.modeling.hub import model_fingerprint
        from hpu_duo.modeling.loading import read_config

        directory = MODEL_DIR if self.model is None else self.model
        read_config(directory)
        return {
            "model": "built-in" if self.model is None else str(self.model.resolve()),
            FINGERPRINT: model_fingerprint(directory),
            "pattern": None if self._given("pattern") is None else _digests(Path(self._given("pattern"))),
            "kv_plan": None if self._given("kv_plan") is None else Path(self._given("kv_plan")).name,
            # Bytes kept are whole blocks, and a budget may be a share of the longest text.
            **{name: self._given(name) for name in _DECISIVE},
        }

    def load(self, num_requests: int = MAX_NUM_SEQS) -> Subject:
        """Load the model; see ``load_model``."""
        from hpu_duo.lab.eval import Subject

        loaded = load_model(self.model, self.engine, num_requests)
        _tell(loaded.engine.notes)
        return Subject(loaded)

    def check_patterns(self, patterns: Iterable[HeadPattern]) -> None:
        """Print a note for each pattern that does not say which model it was made for.

        Raises:
            ValueError: one was made for another model.
        """
        from hpu_duo.config.engine import HeadConfig
        from hpu_duo.startup.head_choice import check_pattern

        for pattern in patterns:
            _tell(check_pattern(HeadConfig(pattern=pattern), self.model or MODEL_DIR))

    @property
    def load_full(self) -> Callable[[], Subject] | None:
        """Return a loader of the same model with full attention; None if no option lets heads stream."""
        alike = (*opt.CUT, *opt.KEPT, "attention_rule")
        streams = opt.is_cut(self.engine) or self._given("pattern") is not None
        if not streams and not opt.changed({name: self._given(name) for name in alike[len(opt.CUT) :]}):
            return None
        others = {name: value for name, value in self.engine.items() if name not in alike}
        return replace(self, engine=cast(EngineOverrides, others)).load

    def load_with(self, pattern: HeadPattern) -> Subject:
        """Load the same model with a binarised pattern."""
        from hpu_duo.lab.eval import Subject

        return Subject(load_model(self.model, with_pattern(self.engine, pattern), MAX_NUM_SEQS))

    def _given(self, name: str) -> Any:
        return self.engine.get(name, SETTINGS[name].default)


def _tell(notes: Iterable[str]) -> None:
    for note in notes:
        typer.echo(f"hpu-duo: note: {note}", err=True)


def text_settings(text: PasskeyText) -> dict[str, str]:
    """Return the settings of the texts that the results depend on."""
    return {"haystack": text.haystack.fingerprint, "words": text.source.value}


def digest(path: Path) -> str:
    """SHA-256 of a file, which identifies the inputs of results.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _digests(pattern: Path) -> dict[str, str]:
    """Digests of the files of a pattern: scores, windows, and the retrieval heads if it names them."""
    from hpu_duo.heads.pattern import CONFIG_FILE, RETRIEVAL_FILE, SCORES_FILE

    optional = [RETRIEVAL_FILE] if (pattern / RETRIEVAL_FILE).is_file() else []
    return {name: digest(pattern / name) for name in (SCORES_FILE, CONFIG_FILE, *optional)}


def read_pattern(path: Path | None, heads: EngineOverrides) -> HeadPattern:
    """Read the pattern in a directory, with the window of the options; None is the built-in model's."""
    from hpu_duo.heads import HeadPattern

    pattern = HeadPattern.load(PATTERN_DIR if path is None else path)
    sink, recent = heads.get("sink"), heads.get("recent")
    return replace(
        pattern,
        sink=pattern.sink if sink is None else sink,
        recent=pattern.recent if recent is None else recent,
    )

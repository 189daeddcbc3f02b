"""Options of commands: settings, derived from fields of ``hpu_duo.config``, and others that are shared.

They are also read here: paths, prompts, and the model that they describe.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.cli.terminal import exact_size, parse_bytes, user_errors
from hpu_duo.config.engine import SETTINGS
from hpu_duo.config.limits import SchedulerConfig
from hpu_duo.config.option import ENGINE, HEADS, LIMITS, Option, Setting, settings_of
from hpu_duo.config.overrides import EngineOverrides
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.heads import HeadPattern
    from hpu_duo.llm import HPUDuoModel


def _finder(needs_weights: bool) -> Callable[[Path | None], Path | None]:
    """Callback that turns the id of a model into the directory of its files."""

    def find(given: Path | None) -> Path | None:
        # What is no id is for the command to refuse, after what it checks first.
        if given is None or given.is_absolute() or given.exists():
            return given
        # Slow to import, and only ids need it.
        from hpu_duo.modeling.hub import find_checkpoint, is_id, split_revision

        name, revision = split_revision(str(given))
        if not is_id(name):
            return given
        with user_errors():
            return find_checkpoint(name, revision, needs_weights=needs_weights)

    return find


def model_option(help: str, *, needs_weights: bool = True, **options: Any) -> Any:
    """Make the option of a command that takes a model; an id arrives as the directory of its files.

    Args:
        needs_weights: False where config.json is enough.
        options: of ``typer.Option``.
    """

    return typer.Option(
        parser=_path,
        callback=_finder(needs_weights),
        metavar="DIR|ID",
        help=f"{help} Or ORG/NAME[@REVISION] on the hub.",
        **options,
    )


def model_argument(help: str) -> Any:
    """Make the argument of a command that takes a model with weights."""
    return typer.Argument(
        parser=_path,
        callback=_finder(True),
        metavar="DIR|ID",
        help=f"{help} Or ORG/NAME[@REVISION] on the hub.",
    )


def _path(text: str | Path) -> Path:
    # An empty path would be the current directory.
    with user_errors():
        if not str(text):
            raise ValueError("expected a directory or the id of a model, got ''")
    return Path(text)


def path(text: str | Path) -> Path:
    """Read a path; raises ``typer.BadParameter`` for an empty one, which pathlib takes for ``.``."""
    if not str(text):
        raise typer.BadParameter("expected a path, got ''")
    return Path(text)


def refuse_empty_paths(app: typer.Typer) -> None:
    """Read every path of every command of ``app``, those of its groups too, by ``path``."""
    for command in app.registered_commands:
        callback: Any = command.callback
        evaluated = signature(callback, eval_str=True)
        for parameter in evaluated.parameters.values():
            _read_by_path(parameter.annotation)
        # Once evaluated, annotations are the objects that have been changed.
        callback.__signature__ = evaluated
        callback.__annotations__ = {each.name: each.annotation for each in evaluated.parameters.values()}
    for group in app.registered_groups:
        if group.typer_instance is not None:
            refuse_empty_paths(group.typer_instance)


def _read_by_path(annotation: Any) -> None:
    if get_origin(annotation) is Annotated:
        kind, *notes = get_args(annotation)
        for note in notes:
            if _has_paths(kind) and hasattr(note, "parser"):
                note.parser = path


def _has_paths(kind: Any) -> bool:
    return kind is Path or any(map(_has_paths, get_args(kind)))


STDIN = "-"


def read_prompts(texts: Sequence[str], files: Sequence[str]) -> list[str]:
    """The texts, then the contents of the files, in the order given.

    Args:
        files: paths of UTF-8 texts; ``-`` is standard input.

    Raises:
        ValueError: there is none, one is empty, a file cannot be read, or standard input is named twice.
    """
    if list(files).count(STDIN) > 1:
        raise ValueError("expected standard input (--file -) at most once")
    named = [
        (decoded(text, f"prompt {number}"), f"prompt {number}") for number, text in enumerate(texts, start=1)
    ]
    named += [(read_text(name), f"the prompt file {name!r}") for name in files]
    if not named:
        raise ValueError("expected a prompt: --prompt TEXT, --file PATH, or --file - for standard input")
    for text, name in named:
        if not text:
            raise ValueError(f"expected text in {name}, got none")
    return [text for text, _ in named]


def decoded(text: str, name: str) -> str:
    """Decode a text of the command line as UTF-8, whatever the locale is.

    Args:
        name: name of the text, for the message.

    Raises:
        ValueError: its bytes are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        # Bytes that the locale does not have arrive as surrogates.
        return _utf8(os.fsencode(text), name)
    return text


def _utf8(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8 text in {name}, got byte {data[error.start]:#04x}") from None


def read_text(name: str) -> str:
    """Return the text of a file, ``-`` is standard input.

    Raises:
        ValueError: it cannot be read, or is not UTF-8.
    """
    try:
        data = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the prompt file {name!r}: {error.strerror}") from error
    return _utf8(data, repr(name))


def tokenizer_of(model: HPUDuoModel) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer.

    Raises:
        ValueError: it has none, so text can be neither read nor written.
    """
    if model.tokenizer is None:
        raise ValueError(
            f"expected a tokenizer beside the model in {model.engine_config.model.path}, found none"
        )
    return model.tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, text: str, is_chat: bool = False) -> list[int]:
    """Token ids of a prompt, with the special tokens that the tokenizer or its chat template adds.

    Args:
        is_chat: take the text as the user's message, and let the assistant answer.

    Raises:
        ValueError: a chat is wanted and the tokenizer has no chat template.
    """
    if not is_chat:
        return list(tokenizer(text)["input_ids"])
    if tokenizer.chat_template is None:
        raise ValueError("expected a tokenizer with a chat template for --chat, got one without")
    # As text first: what apply_chat_template returns for ids differs between transformers 4 and 5.
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(said, add_special_tokens=False)["input_ids"])


__all__ = ["ENGINE", "HEADS", "LIMITS"]


class Only:
    """The options of a group that a command offers, in ``Annotated[Group, Only("a", "b", c=1)]``.

    Args:
        names: fields or settings; the others keep their defaults. None of them = all.
        defaults: further settings, with defaults of this command. None leaves a setting to what loads the
            model.
    """

    def __init__(self, *names: str, **defaults: Any) -> None:
        self.names = names
        self.defaults = defaults


class SettingsOf:
    """Fields of a configuration that are options, in ``Annotated[dict[str, Any], SettingsOf(ServerConfig)]``.

    The command gets a dictionary of fields.

    Args:
        kind: dataclass with settings among its fields.
        defaults: see ``Only``.
    """

    def __init__(self, kind: Any, **defaults: Any) -> None:
        self.settings = {setting.name: setting for setting in settings_of(kind)}
        self.defaults = defaults


def of_setting(
    name: str, *, help: str | None = None, panel: str | None = None, unset: str | bool = ""
) -> Any:
    """Return the option of a setting of an engine.

    Args:
        help, panel, unset: in place of the setting's own.
    """
    option = SETTINGS[name].option
    return _typer_option(replace(option, help=help or option.help, panel=panel or option.panel), unset)


def _typer_option(option: Option, unset: str | bool = "") -> Any:
    return typer.Option(
        *option.flags,
        metavar=option.metavar,
        help=option.help,
        show_default=unset or option.unset or True,
        rich_help_panel=option.panel,
    )


def option_in(panel: str) -> Callable[..., Any]:
    """Return ``typer.Option`` for the options of a panel; its first argument is the help, then come flags."""

    def option(help: str, *flags: str, **options: Any) -> Any:
        return typer.Option(*flags, help=help, rich_help_panel=panel, **options)

    return option


@dataclass(frozen=True)
class _Group:
    make: Callable[..., Any]
    options: tuple[Parameter, ...]

    def take(self, values: dict[str, Any]) -> Any:
        """Make the group of its options' values, which are taken out of ``values``."""
        return self.make(**{option.name: values.pop(option.name) for option in self.options})


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command in typer's form: parameters that are groups of options are spread into their fields.

    A group is ``EngineOverrides``, the settings of an engine, or a dataclass whose fields are annotated as
    options, as parameters of a command are; the defaults of the fields are those of the options. The options
    take the place of the group.

    Raises:
        TypeError: a group has no such field, or a field has no option or no default.
    """
    groups: dict[str, _Group] = {}
    spread: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        group = _group_of(parameter.annotation)
        if group is None:
            spread.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
        else:
            groups[parameter.name] = group
            spread += group.options

    @wraps(command)
    def run(**values: Any) -> None:
        with user_errors():
            made = {name: group.take(values) for name, group in groups.items()}
        command(**values, **made)

    # What typer reads a command from.
    run.__signature__ = Signature(spread)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in spread}
    return run


def _group_of(annotation: Any) -> _Group | None:
    kind, *notes = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    for note in notes:
        if isinstance(note, SettingsOf):
            fields_of = {name: setting.field.name for name, setting in note.settings.items()}
            return _settings(note.settings, tuple(note.settings), note.defaults, fields_of)
    only = next((note for note in notes if isinstance(note, Only)), Only())
    if kind is EngineOverrides:
        offered = {name: each for name, each in SETTINGS.items() if each.option.panel is not None}
        return _settings(offered, only.names or tuple(offered), only.defaults, {})
    return _fields(kind, only) if isinstance(kind, type) and is_dataclass(kind) else None


_annotated: Any = Annotated
"""For types that are known only when this runs."""


_PANELS: dict[str | None, int] = {HEADS: 1, LIMITS: 2, ENGINE: 3}
"""Order of panels in the help; others come first, in the order of their fields."""


def _settings(
    known: Mapping[str, Setting], names: tuple[str, ...], defaults: Mapping[str, Any], keys: Mapping[str, str]
) -> _Group:
    """Return a group that is a dictionary of values, without those that are left open.

    Args:
        known: settings by name.
        names: of the options.
        defaults: of options, in place of the settings' own.
        keys: of the dictionary, where they are not the names.
    """
    chosen = dict.fromkeys((*names, *defaults))
    if unknown := chosen.keys() - known.keys():
        raise TypeError(f"{', '.join(sorted(unknown))}: expected settings that are options")
    options = []
    for name in sorted(chosen, key=lambda name: _PANELS.get(known[name].option.panel, 0)):
        setting = known[name]
        default = defaults.get(name, setting.default)
        kind = setting.kind
        if setting.option.is_size:
            kind, default = str, None if default is None else exact_size(default)
        shown = _typer_option(setting.option, "" if default is None else True)
        annotation = _annotated[kind | None if default is None else kind, shown]
        options.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))

    def make(**values: Any) -> dict[str, Any]:
        found = {}
        for name, value in values.items():
            if value is None and known[name].default is not None:
                continue
            is_text = known[name].option.is_size and value is not None
            if isinstance(value, list):
                value = tuple(value)
            found[keys.get(name, name)] = parse_bytes(value) if is_text else value
        return found

    return _Group(make, tuple(options))


def _fields(kind: type[Any], only: Only) -> _Group:
    known = {field.name: field for field in fields(kind)}
    hints = get_type_hints(kind, include_extras=True)
    options = []
    for name in only.names or known:
        if name not in known or known[name].default is MISSING or get_origin(hints[name]) is not Annotated:
            raise TypeError(f"{kind.__name__}.{name}: expected a field that is an option and has a default")
        options.append(
            Parameter(name, Parameter.KEYWORD_ONLY, default=known[name].default, annotation=hints[name])
        )
    return _Group(kind, tuple(options))


def changed(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the flags of settings that are not as they would be anyway."""
    names = (name for name, value in given.items() if value != SETTINGS[name].default)
    return tuple(f"--{name.replace('_', '-')}" for name in names)


CUT = ("pattern", "sparsity", "threshold", "sink", "recent", "max_layer_kinds")
"""Settings that say which heads stream."""
KEPT = ("kv_policy", "kv_budget", "kv_plan", "kv_prompt", "kv_chunk")
"""Settings that say what heads keep that have a KV budget."""
STORED = ("kv_cache_dtype", "kv_cache_dtype_skip_layers", "calculate_kv_scales", "kv_scales", "ring_dtype")
"""Settings of the format of keys and values."""
STEP = ("device", "dtype", "graphs", "attention", "softmax")
"""Settings of how a step runs."""

Engine = Annotated[EngineOverrides, Only(max_num_seqs=None)]
"""All settings; as many requests run at a time as there are."""
Kept = Annotated[EngineOverrides, Only(*KEPT, "attention_rule")]

Model = Annotated[
    Path | None,
    model_option("Directory of a transformers checkpoint.", show_default="the built-in model"),
]
Seed = Annotated[int, typer.Option(help="Fixes everything that is drawn at random.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text and tables.")]


def is_cut(given: EngineOverrides) -> bool:
    """Whether sparsity or threshold are given, so that the pattern's scores are cut anew."""
    return given.get("sparsity") is not None or given.get("threshold") is not None


class ManyValues(TyperCommand):
    """A command whose repeatable options also take their values in a row.

    ``--context 8192 32768`` becomes ``--context 8192 --context 32768``. For commands without positional
    arguments, where a word that belongs to no option could only be a mistake.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Spread the rows of values, then parse as usual."""
        normalize = ctx.token_normalize_func or str
        names = {
            name
            for parameter in self.get_params(ctx)
            if getattr(parameter, "multiple", False)
            for name in parameter.opts
        }
        spread: list[str] = []
        current: str | None = None
        has_value = False
        for word in args:
            if word.startswith("-"):
                name = "--" + normalize(word.partition("=")[0].removeprefix("--"))
                current = word.partition("=")[0] if name in names else None
                has_value = "=" in word
            elif current is not None:
                if has_value:
                    spread.append(current)
                has_value = True
            spread.append(word)
        return super().parse_args(ctx, spread)


def load_model(
    path: Path | None,
    given: EngineOverrides,
    num_requests: int = SchedulerConfig.max_num_seqs,
    seed: int = 0,
) -> HPUDuoModel:
    """Load the model that the options describe, and warm it up if nothing may be compiled afterwards.

    Args:
        path, given, num_requests, seed: see ``load_cold``.

    Raises:
        ValueError: see ``load_cold``.
    """
    loaded = load_cold(path, given, num_requests, seed)
    if given.get("fail_on_recompile"):
        loaded.warmup()
    return loaded


def load_cold(
    path: Path | None,
    given: EngineOverrides,
    num_requests: int = SchedulerConfig.max_num_seqs,
    seed: int = 0,
) -> HPUDuoModel:
    """Load the model that the options describe, and keep other libraries from the terminal.

    Args:
        path: None is the built-in model, whose own pattern is used when sparsity or threshold are given
            without a pattern.
        given: settings of the engine.
        num_requests: expected requests, the default of ``max_num_seqs`` unless the buckets are a manifest,
            which has its own.
        seed: for requests without a seed.

    Raises:
        ValueError: the files or the options do not fit together; see ``HPUDuoModel.from_pretrained``.
    """
    for name, file in (
        ("--record-shapes", given.get("record_shapes")),
        ("--record-steps", given.get("record_steps")),
    ):
        if file is not None:
            check_file(name, Path(file))
    settings: EngineOverrides = {**with_own_pattern(path, given), "seed": seed}
    if "max_num_seqs" not in settings:
        settings["max_num_seqs"] = _max_num_seqs(settings, num_requests)
    # Everything that needs torch comes after what can be refused without it.
    from transformers.utils import logging

    from hpu_duo.llm import HPUDuoModel

    # torch's notes to developers would stand between the user's text and the table.
    warnings.filterwarnings("ignore", message=".* is in beta and the API may change", category=UserWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return HPUDuoModel.from_pretrained(MODEL_DIR if path is None else path, **settings)


def with_own_pattern(path: Path | None, given: EngineOverrides) -> EngineOverrides:
    """Return settings with the built-in model's pattern, where its heads are cut and none is given."""
    if path is None and is_cut(given) and given.get("pattern") is None:
        return {**given, "pattern": PATTERN_DIR}
    return {**given}


def with_pattern(given: EngineOverrides, pattern: HeadPattern | None) -> EngineOverrides:
    """Return settings with a pattern to take as it is, or none, whatever the options say of heads."""
    others = {name: value for name, value in given.items() if name not in CUT}
    own = {} if pattern is None else {"pattern": pattern, "max_layer_kinds": pattern.num_layers}
    return cast(EngineOverrides, {**others, **own})


def _max_num_seqs(given: EngineOverrides, num_requests: int) -> int:
    from graphs.manifest import is_manifest, read_manifest

    buckets = given.get("buckets")
    if isinstance(buckets, str | Path) and is_manifest(buckets):
        limit = read_manifest(buckets).configuration.get("limits.max_num_seqs")
        if isinstance(limit, int):
            return limit
    return min(num_requests, SchedulerConfig.max_num_seqs)

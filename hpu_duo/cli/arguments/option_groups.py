"""Options that several commands share, written once as the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Only:
    """The fields of a group that a command offers, in ``Annotated[Group, Only("a", "b")]``.

    The others keep their defaults.
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)


@dataclass(frozen=True)
class _Group:
    kind: type[Any]
    options: tuple[Parameter, ...]

    def take(self, values: dict[str, Any]) -> Any:
        """Make the group of its options' values, which are taken out of ``values``."""
        return self.kind(**{option.name: values.pop(option.name) for option in self.options})


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command in typer's form: parameters that are groups of options are spread into their fields.

    A group is a dataclass whose fields are annotated as options, as parameters of a command are; the defaults
    of the fields are those of the options. The options take the place of the group.

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
        made = {name: group.take(values) for name, group in groups.items()}
        command(**values, **made)

    # What typer reads a command from.
    run.__signature__ = Signature(spread)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in spread}
    return run


def _group_of(annotation: Any) -> _Group | None:
    kind, *notes = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return None
    known = {field.name: field for field in fields(kind)}
    names = next((note.names for note in notes if isinstance(note, Only)), tuple(known))
    hints = get_type_hints(kind, include_extras=True)
    options = []
    for name in names:
        if name not in known or known[name].default is MISSING or get_origin(hints[name]) is not Annotated:
            raise TypeError(f"{kind.__name__}.{name}: expected a field that is an option and has a default")
        options.append(
            Parameter(name, Parameter.KEYWORD_ONLY, default=known[name].default, annotation=hints[name])
        )
    return _Group(kind, tuple(options))

"""Names of the modules that a refused model has and that are not served."""

from __future__ import annotations

import re

from torch import nn

from hpu_duo.modeling.recurrent import has_states, missing_functions

_STATES = re.compile(
    r"(Delta(Net|Attention)|(Linear|Lightning)Attention|Mixer|MambaLayer|ShortConv(olution)?|RecurrentBlock)$"
)
_CHOICES = re.compile(r"Indexer$")


def missing_parts(model: nn.Module) -> str:
    """Name the modules that a refused model has and that are not served, for the end of a message."""
    classes = sorted({type(module) for module in model.modules()}, key=lambda each: each.__name__)
    states = [each for each in classes if missing_functions(each) or _keeps_states(each)]
    found = (
        ("states of recurrences and convolutions", map(_with_functions, states)),
        ("keys that a model chooses", (each.__name__ for each in classes if _CHOICES.search(each.__name__))),
    )
    texts = ((what, ", ".join(of)) for what, of in found)
    return "".join(f"; {what} are not supported: {of}" for what, of in texts if of)


def _keeps_states(module: type[nn.Module]) -> bool:
    """Whether a class is named like a recurrence, and calls for states in a way of its own."""
    return _STATES.search(module.__name__) is not None and not has_states(module)


def _with_functions(module: type[nn.Module]) -> str:
    """Return the name of a class, with the functions in it that are missing here."""
    functions = missing_functions(module)
    return f"{module.__name__} ({', '.join(functions)})" if functions else module.__name__

"""Texts about what a refused model has and that is not served."""

from __future__ import annotations

import re

from torch import nn

from hpu_duo.modeling.recurrent import has_states, missing_functions

_STATES = re.compile(
    r"(Delta(Net|Attention)|(Linear|Lightning)Attention|Mixer|MambaLayer|ShortConv(olution)?|RecurrentBlock"
    r"|LSTMLayer)$|Rwkv\w*Attention$"
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


def count_text(num_calls: int, num_modules: int, num_layers: int | None) -> str:
    """Return a text about a wrong number of attention calls."""
    expected = f"expected one attention call in each of its {num_layers} layers, got"
    if not num_calls:
        return (
            f"{expected} none: they attend by code of their own, beside transformers' attention interface, "
            "or not at all"
        )
    if num_modules < num_calls:
        return (
            f"expected each attention module to be called once for a token, got {num_calls} calls of "
            f"{num_modules} attention modules: each would write its cache several times"
        )
    if num_layers is not None and num_calls > num_layers:
        return f"{expected} {num_calls} calls: some layers attend twice, to another text for example"
    return f"{expected} {num_calls} calls; layers without attention are missing here"


def _keeps_states(module: type[nn.Module]) -> bool:
    """Whether a class is named like a recurrence, and calls for states in a way of its own."""
    return _STATES.search(module.__name__) is not None and not has_states(module)


def _with_functions(module: type[nn.Module]) -> str:
    """Return the name of a class, with the functions in it that are missing here."""
    functions = missing_functions(module)
    return f"{module.__name__} ({', '.join(functions)})" if functions else module.__name__

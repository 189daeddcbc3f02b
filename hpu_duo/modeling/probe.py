"""Record the attention calls of a model, and read the window of each layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpu_duo.modeling.attention import AttentionCall, Probe, attending
from hpu_duo.modeling.row_kinds import row_kinds
from hpu_duo.modeling.trial import refusing, try_flat_batch
from kernels_ref import RowKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FAR = 1 << 24
_LONGEST = 1 << 22
# Two positions that no chunk length divides alike.
_QUERIES = (_FAR, _FAR + 4099)
_IRREGULAR = -1.0
_WINDOW = "hpu_duo_window"

Rule = Callable[..., torch.Tensor]


def look_through(rule: Rule) -> float:
    """Return the window of a mask rule: tokens seen, the own one included; infinity when it has no bound.

    Returns:
        A negative number for a rule that is not causal, or that is not the same window everywhere.
    """
    windows = {_window_at(rule, query) for query in _QUERIES}
    return windows.pop() if len(windows) == 1 else _IRREGULAR


def read_window(mask: torch.Tensor | None) -> float | None:
    """Return the result of ``look_through`` for the mask that a layer received.

    The window is an attribute of the very tensor that our mask function returned. Any tensor that a model
    makes of it, such as a sum with biases or a choice of keys by content, does not have the attribute.

    Returns:
        None if the layer received another tensor, or no mask.
    """
    window: float | None = getattr(mask, _WINDOW, None)
    return window


def _window_at(rule: Rule, query: int) -> float:
    def sees(distance: int) -> bool:
        zero = torch.tensor(0)
        return bool(rule(zero, zero, torch.tensor(query), torch.tensor(query - distance)))

    if sees(-1) or not sees(0):
        return _IRREGULAR
    if sees(_LONGEST):
        return math.inf
    seen, hidden = 0, _LONGEST
    while hidden - seen > 1:
        middle = (seen + hidden) // 2
        seen, hidden = (middle, hidden) if sees(middle) else (seen, middle)
    return float(hidden)


def mark(
    *_: Any,
    mask_function: Rule,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    **__: Any,
) -> torch.Tensor:
    """The mask function that transformers calls: a tensor that carries the window of the rule."""
    window = look_through(mask_function)
    # Its value is for people who print it; attention of a family's own making adds it to scores.
    marker = torch.full((1, 1, 1, 1), window, dtype=torch.float64).to(device, dtype)
    setattr(marker, _WINDOW, window)
    return marker


_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer of a model.

    Attributes:
        module: the layer.
        attention: its attention module.
        call: its attention call.
        rows: kinds of state that a row has in it besides what its heads keep.
    """

    module: nn.Module
    attention: nn.Module
    call: AttentionCall
    rows: tuple[RowKind, ...] = ()


def probe(model: PreTrainedModel) -> tuple[DecoderLayer, ...]:
    """Return the decoder layers of a model in order, with the attention call of each.

    A trial run checks that the model does nothing else with a text.

    Raises:
        ValueError: the model cannot be served; the message says what is missing.
    """
    layers = read_layers(model)
    try_flat_batch(model, [layer.call for layer in layers])
    return layers


def read_layers(model: PreTrainedModel) -> tuple[DecoderLayer, ...]:
    """Return the same without the trial run, which needs weights: a model on ``meta`` is enough.

    Heads, windows, soft caps and sinks are read from the attention call itself, so a family
    needs no code of its own here.

    Raises:
        ValueError: the model cannot be served; the message says what is missing.
    """
    name = type(model).__name__
    calls = _record_calls(model)
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    num_modules = len({id(call.module) for call in calls})
    if len(calls) != num_layers or num_modules != num_layers:
        raise ValueError(f"{name} cannot be served: {_count_text(len(calls), num_modules, num_layers)}")
    for index, call in enumerate(calls):
        _check_call(f"{name}, layer {index}", call)
    calls = [_with_window(model, index, call) for index, call in enumerate(calls)]
    paths = {id(module): path for path, module in model.named_modules()}
    parents = [model.get_submodule(paths[id(call.module)].rpartition(".")[0]) for call in calls]
    config = model.config.get_text_config()
    return tuple(
        DecoderLayer(parent, call.module, call, row_kinds(config, index))
        for index, (parent, call) in enumerate(zip(parents, calls))
    )


def _count_text(num_calls: int, num_modules: int, num_layers: int | None) -> str:
    """Say how a number of calls is wrong."""
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
    return (
        f"{expected} {num_calls} calls; layers without attention, or that share keys and values, "
        "are missing here"
    )


@torch.inference_mode()
def _record_calls(model: PreTrainedModel) -> list[AttentionCall]:
    """Run one token through the model, which makes its own mask, and return its attention calls."""
    recorder = Probe()
    device = next(model.parameters()).device
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    with refusing(model), attending(model, recorder):
        model(
            input_ids=token,
            position_ids=token,
            attention_mask=torch.ones_like(token),
            use_cache=False,
            logits_to_keep=token[0],
        )
    return recorder.calls


def _check_call(where: str, call: AttentionCall) -> None:
    if call.unknown:
        raise ValueError(f"{where} cannot be served: unknown attention arguments {', '.join(call.unknown)}")
    if call.value_head_dim != call.head_dim:
        raise ValueError(
            f"{where} cannot be served: keys of size {call.head_dim} with values of size "
            f"{call.value_head_dim}"
        )
    if call.num_heads % call.num_kv_heads:
        raise ValueError(
            f"{where} cannot be served: {call.num_heads} query heads do not divide into "
            f"{call.num_kv_heads} key/value heads"
        )


def _with_window(model: PreTrainedModel, index: int, call: AttentionCall) -> AttentionCall:
    """The call with the window that the layer's mask shows."""
    where = f"{type(model).__name__}, layer {index}"
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None)
    if types is not None and types[index] not in _SERVED_LAYER_TYPES:
        raise ValueError(
            f"{where} cannot be served: layer type {types[index]!r}, "
            f"expected one of {', '.join(sorted(_SERVED_LAYER_TYPES))}"
        )
    seen = read_window(call.mask)
    if seen is None:
        got = "no mask" if call.mask is None else "a mask of its own making"
        raise ValueError(
            f"{where} cannot be served: expected its attention to get the mask that transformers' mask "
            f"function returned, as it is, got {got}; who may attend to whom may depend on the text there"
        )
    if seen < 0:
        raise ValueError(f"{where} cannot be served: its mask is neither causal nor a causal sliding window")
    return replace(call, sliding_window=None if math.isinf(seen) else int(seen))

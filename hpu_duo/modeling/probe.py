"""Record the attention calls of a model, and find the window and the further state of each layer.

A trial at load compares a flat batch with transformers' own run of each text alone, since the attention call
does not show everything that a model does with a text: biases that ride on the mask, positions counted from
the mask, layers that mix neighbouring tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from bias_builders import Window, causal_mask
from hpu_duo.modeling.attention import (
    NAME,
    AttentionCall,
    LayerKind,
    Probe,
    Trial,
    attending,
    placeholder_mask,
)
from hpu_duo.modeling.experts import experts_skipped
from hpu_duo.modeling.latents import check_expansion, recording_expansions
from hpu_duo.modeling.missing import count_text, missing_parts
from hpu_duo.modeling.recurrent import (
    RecurrentLayer,
    layers_besides,
    lists_of,
    number_of,
    recurrent_layers,
    recurring,
    try_recurrences,
)
from kernels_ref import RowKind
from kernels_ref.groups.budget_chunks import turned, turns

if TYPE_CHECKING:
    from transformers import PreTrainedModel


FindRowKind: TypeAlias = Callable[[Any, int], RowKind | None]
"""Returns the state of a layer, or None, from the configuration of the text model and the layer's number."""

ROW_KINDS: dict[str, FindRowKind] = {}
"""Functions that find the states of a model, by the names of their kinds."""


def row_kinds(text_config: Any, layer: int) -> tuple[RowKind, ...]:
    """Return the kinds of state that a layer has, in the order of ``ROW_KINDS``.

    Raises:
        ValueError: a kind has another name than it is registered under.
    """
    found = {name: kind for name, find in ROW_KINDS.items() if (kind := find(text_config, layer)) is not None}
    for name, kind in found.items():
        if kind.name != name:
            raise ValueError(f"expected a row state of kind {name!r}, as registered, got {kind.name!r}")
    return tuple(found.values())


# Errors of a model's forward for unsupported arguments, or an unsupported mask.
_FORWARD_ERRORS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError, AssertionError)


@contextmanager
def refusing(model: nn.Module) -> Iterator[None]:
    """Convert errors of the model's forward to a ``ValueError`` that it cannot be served."""
    try:
        yield
    except _FORWARD_ERRORS as error:
        name = type(model).__name__
        text = repr(error) if isinstance(error, LookupError) else str(error)
        raise ValueError(
            f"{name} cannot be served: it fails on flattened tokens: {text}{missing_parts(model)}"
        ) from error


NUM_TEXTS = 4
TEXT_LEN = 4
_LAYERS_OF_A_KIND = 2

TOLERANCE = 1e-3
"""Largest relative error of the last norm's output for a token, in float32."""

# Rounding may send a token of a mixture-of-experts model to another expert.
_MAX_ROUNDED_SHARE = 0.125


@torch.inference_mode()
def try_flat_batch(
    model: PreTrainedModel, calls: Sequence[AttentionCall], recurrent: Sequence[RecurrentLayer] = ()
) -> None:
    """Run short texts in one batch, attending by ``calls``, and compare with transformers' own run.

    It runs in float32 whatever the dtype of the weights is, because rounding errors hide flaws and grow in
    deep models. Only one widened layer at a time is in memory, and only two layers of each kind run: 0.9 GB
    and four seconds of one core for an 8B model. The head, which sees one token at a time, is left out.

    Args:
        calls: the attention call of each layer, windows included.
        recurrent: the layers with states.

    Raises:
        ValueError: weights are not finite, or the results differ, so the model does something that its
            attention calls do not show.
    """
    device = next(model.parameters()).device
    vocab_size = model.config.get_text_config().vocab_size
    # Spread over the vocabulary, and every text different.
    tokens = (torch.arange(NUM_TEXTS * TEXT_LEN, device=device) * 7919 + 11) % vocab_size
    positions = torch.arange(TEXT_LEN, device=device).repeat(NUM_TEXTS)
    trial = DenseTrial({id(call.module): call for call in calls}, positions)
    texts = tokens.view(NUM_TEXTS, TEXT_LEN)
    layers = _representatives(model, calls, recurrent)
    run = [each for each in recurrent if each.module in layers]
    with refusing(model), _only(model, layers) as skipped, _widened(model, layers, skipped):
        with attending(model, trial), recurring(run, NUM_TEXTS, TEXT_LEN, device):
            flat = model(
                input_ids=tokens[None],
                position_ids=positions[None],
                attention_mask=placeholder_mask(device),
                use_cache=False,
            ).logits[0]
        model.set_attn_implementation("eager")
        apart = model(input_ids=texts, attention_mask=torch.ones_like(texts), use_cache=False).logits
    model.set_attn_implementation(NAME)
    _check_finite(model, apart)
    _compare(model, flat.float(), apart.flatten(0, 1).float())


def _representatives(
    model: nn.Module, calls: Sequence[AttentionCall], recurrent: Sequence[RecurrentLayer]
) -> list[nn.Module]:
    """The first two layers of each kind; all of them where no one list can be cut short."""
    paths = {id(module): path for path, module in model.named_modules()}
    layers = [model.get_submodule(paths[id(call.module)].rpartition(".")[0]) for call in calls]
    specs: list[Hashable] = [(call.sliding_window, call.softcap, call.scale) for call in calls]
    for each in recurrent:
        if each.module not in layers:
            layers.append(each.module)
            specs.append(each.kinds)
    if not any(lists_of(model, layers)):
        return layers
    besides = layers_besides(model, layers)
    layers += besides
    specs += [()] * len(besides)
    chosen: list[nn.Module] = []
    seen: Counter[Hashable] = Counter()
    for layer, spec in zip(layers, specs):
        kind = LayerKind(layer, spec)
        seen[kind] += 1
        if seen[kind] <= _LAYERS_OF_A_KIND:
            chosen.append(layer)
    return chosen


@contextmanager
def _only(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """Context manager that reduces the model to these layers, if one list has them all; yields the others.

    The other layers pass their input on. Their indices do not change, because models look up masks and rotary
    embeddings by them.
    """
    skipped = layers_besides(model, layers)
    output_of: list[object] = [None]

    def note(module: nn.Module, args: object, output: object) -> None:
        output_of[0] = output

    def skip(hidden_states: torch.Tensor, *_: object, **__: object) -> object:
        # The first layer is never skipped.
        last = output_of[0]
        return (hidden_states, *last[1:]) if isinstance(last, tuple) else hidden_states

    hooks = [layer.register_forward_hook(note) for layer in layers]
    for layer in skipped:
        layer.forward = skip
    try:
        yield skipped
    finally:
        for hook in hooks:
            hook.remove()
        for layer in skipped:
            del layer.forward


@contextmanager
def _widened(
    model: PreTrainedModel, layers: Sequence[nn.Module], skipped: Sequence[nn.Module]
) -> Iterator[None]:
    """The model in float32, each layer only while it runs, without its head."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    apart = [embedding, *([] if head is None else [head]), *layers, *skipped]
    held = {id(p) for module in apart for p in module.parameters()}
    narrow: dict[nn.Parameter, torch.Tensor] = {}

    def widen(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                narrow[parameter] = parameter.data
                parameter.data = parameter.data.float()

    def restore(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter in narrow:
                parameter.data = narrow.pop(parameter)

    hooks = [embedding.register_forward_hook(lambda module, args, output: output.float())]
    for layer in layers:
        hooks.append(layer.register_forward_pre_hook(lambda module, args: widen(module.parameters())))
        hooks.append(layer.register_forward_hook(lambda module, args, output: restore(module.parameters())))
    if head is not None:
        head.forward = _as_it_is
    try:
        widen(p for p in model.parameters() if id(p) not in held)
        yield
    finally:
        restore(list(narrow))
        for hook in hooks:
            hook.remove()
        if head is not None:
            del head.forward


def _as_it_is(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


def _check_finite(model: PreTrainedModel, apart: torch.Tensor) -> None:
    """Raise ValueError for weights that are not finite, before the trial fails because of them."""
    if bool(apart.isfinite().all()):
        return
    broken = [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]
    where = f"NaN or infinite values in {broken[0]}" if broken else "an overflow in short texts"
    more = f" and {len(broken) - 1} more weights" if broken[1:] else ""
    raise ValueError(
        f"{type(model).__name__} cannot be served: transformers' own run returns NaN or infinite values; "
        f"expected finite weights, got {where}{more}"
    )


def _compare(model: nn.Module, flat: torch.Tensor, apart: torch.Tensor) -> None:
    error = (flat - apart).abs().amax(dim=-1) / apart.abs().amax(dim=-1).clamp(min=1e-6)
    # A NaN is an error too.
    share_wrong = 1 - (error <= TOLERANCE).float().mean().item()
    if share_wrong > _MAX_ROUNDED_SHARE:
        raise ValueError(
            f"{type(model).__name__} cannot be served: texts in one flat batch get other results than "
            f"transformers gives each alone (relative error up to {error.max().item():.2g}); something "
            "beside its attention calls reads masks, counts positions or mixes neighbouring "
            f"tokens{missing_parts(model)}"
        )


class DenseTrial(Trial):
    """Attention over the trial's texts, as the calls of a probed model describe it."""

    def __init__(self, calls: Mapping[int, AttentionCall], positions: torch.Tensor) -> None:
        self._calls, self._positions = calls, positions

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Dense attention of one layer: ``[1, heads, T, D]`` each to ``[1, T, heads, D]``."""
        # H query heads, K key/value heads, T tokens of all texts, D head size
        call = self._calls[id(module)]
        text = torch.arange(len(self._positions), device=q.device) // TEXT_LEN
        window = None if call.sliding_window is None else Window(0, call.sliding_window)
        visible_TT = causal_mask(text, self._positions, text, self._positions, NUM_TEXTS, window)
        group = call.num_heads // call.num_kv_heads
        k_HTD, v_HTD = (x[0].float().repeat_interleave(group, dim=0) for x in (k, v))
        scores_HTT = torch.matmul(q[0].float(), k_HTD.transpose(1, 2)) * call.scale
        if call.softcap is not None:
            scores_HTT = call.softcap * torch.tanh(scores_HTT / call.softcap)
        scores_HTT = scores_HTT.masked_fill(~visible_TT, torch.finfo(torch.float32).min)
        if sinks is not None:
            column = sinks.float().view(-1, 1, 1).expand(-1, scores_HTT.shape[1], 1)
            scores_HTT = torch.cat([scores_HTT, column], dim=-1)
        weights_HTT = torch.softmax(scores_HTT, dim=-1)[..., : len(text)]
        return torch.matmul(weights_HTT, v_HTD).to(q.dtype).transpose(0, 1)[None].contiguous()


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
    derives from it, such as a sum with biases or a choice of keys by content, does not have the attribute.

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
    # Custom attention of a family adds it to scores.
    marker = torch.full((1, 1, 1, 1), window, dtype=torch.float64).to(device, dtype)
    setattr(marker, _WINDOW, window)
    return marker


_SERVED_LAYER_TYPES = {"full_attention", "hybrid", "sliding_attention"}


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer of a model.

    Attributes:
        module: the layer.
        attention: its attention module.
        call: its attention call.
        rows: kinds of state of a row in the layer, besides what its heads store.
        number: of the layer among all, those without attention included.
        num_layers: all of them.
    """

    module: nn.Module
    attention: nn.Module
    call: AttentionCall
    rows: tuple[RowKind, ...] = ()
    number: int = 0
    num_layers: int = 0


def pattern_rows(layers: Sequence[DecoderLayer]) -> tuple[int, ...]:
    """Return the row of each layer in a head pattern, which has rows for layers with keys of their own only.

    A retrieval head of a layer that reads an earlier one's keys and values is one of that layer too.
    """
    stored = [number for number, layer in enumerate(layers) if layer.call.source is None]
    row_of = {number: row for row, number in enumerate(stored)}
    sources = ((number, layer.call.source) for number, layer in enumerate(layers))
    return tuple(row_of[number if source is None else source] for number, source in sources)


def probe(model: PreTrainedModel) -> tuple[DecoderLayer, ...]:
    """Return the decoder layers of a model that attend, in order, with the attention call of each.

    Layers with recurrences only are not among them, see ``recurrent_layers``. A trial run checks that the
    model does nothing else with a text.

    Raises:
        ValueError: the model cannot be served; the message has the reason.
    """
    layers, recurrent = read_layers(model), recurrent_layers(model)
    try_recurrences(model, recurrent)
    try_flat_batch(model, [layer.call for layer in layers], recurrent)
    for number, layer in enumerate(layers):
        call = layer.call
        if call.latent is not None:
            where = f"{type(model).__name__}, layer {number}"
            check_expansion(where, call.module, call.latent, call.num_heads, call.value_head_dim)
    return layers


def read_layers(model: PreTrainedModel) -> tuple[DecoderLayer, ...]:
    """Return the same without the trial run, which needs weights: a model on ``meta`` is enough.

    Heads, windows, soft caps and sinks are read from the attention call itself, so a family
    needs no code of its own here.

    Raises:
        ValueError: the model cannot be served; the message has the reason.
    """
    name = type(model).__name__
    calls = _record_calls(model)
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    num_modules = len({id(call.module) for call in calls})
    missing = missing_parts(model)
    recurrent = () if missing else recurrent_layers(model)
    if recurrent and not calls:
        mixers = ", ".join(sorted({type(layer.mixer).__name__ for layer in recurrent}))
        raise ValueError(
            f"{name} cannot be served: expected a layer that attends, got states only ({mixers})"
        )
    is_hybrid = bool(recurrent) and 0 < len(calls) == num_modules < (num_layers or 0)
    if not is_hybrid and (len(calls) != num_layers or num_modules != num_layers):
        count = count_text(len(calls), num_modules, num_layers)
        raise ValueError(f"{name} cannot be served: {count}{missing}")
    paths = {id(module): path for path, module in model.named_modules()}
    parents = [model.get_submodule(paths[id(call.module)].rpartition(".")[0]) for call in calls]
    numbers = list(range(len(calls)))
    if is_hybrid:
        numbers = [number_of(name, paths[id(parent)]) for parent in parents]
    for index, call in zip(numbers, calls):
        _check_call(f"{name}, layer {index}", call, model)
    _check_shared(model, calls)
    calls = [_with_window(model, index, call) for index, call in zip(numbers, calls)]
    config = model.config.get_text_config()
    return tuple(
        DecoderLayer(parent, call.module, call, row_kinds(config, index), index, num_layers or 0)
        for index, parent, call in zip(numbers, parents, calls)
    )


@torch.inference_mode()
def _record_calls(model: PreTrainedModel) -> list[AttentionCall]:
    """Run one token through the model, which creates its own mask, and return its attention calls."""
    recorder = Probe()
    device = next(model.parameters()).device
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    with (
        refusing(model),
        attending(model, recorder),
        experts_skipped(model),
        recording_expansions(model) as recorder.expansions,
    ):
        model(
            input_ids=token,
            position_ids=token,
            attention_mask=torch.ones_like(token),
            use_cache=False,
            logits_to_keep=token[0],
        )
    return recorder.calls


def _check_call(where: str, call: AttentionCall, model: nn.Module) -> None:
    if call.unknown:
        unknown = ", ".join(call.unknown)
        raise ValueError(
            f"{where} cannot be served: unknown attention arguments {unknown}{missing_parts(model)}"
        )
    if call.num_heads % call.num_kv_heads:
        raise ValueError(
            f"{where} cannot be served: {call.num_heads} query heads do not divide into "
            f"{call.num_kv_heads} key/value heads"
        )


def _check_shared(model: PreTrainedModel, calls: Sequence[AttentionCall]) -> None:
    """Raise ValueError unless layers that share keys and values pass on the tensors of an earlier layer."""
    wanted = getattr(model.config.get_text_config(), "num_kv_shared_layers", None) or 0
    found = sum(call.source is not None for call in calls)
    if found < wanted:
        raise ValueError(
            f"{type(model).__name__} cannot be served: expected {wanted} layers (num_kv_shared_layers) that "
            f"attend to the keys and values of earlier ones, got {found}; the others attend to copies"
        )


def _with_window(model: PreTrainedModel, index: int, call: AttentionCall) -> AttentionCall:
    """The call with the window that the layer's mask shows."""
    where = f"{type(model).__name__}, layer {index}"
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None)
    if types is not None and types[index] not in _SERVED_LAYER_TYPES:
        raise ValueError(
            f"{where} cannot be served: layer type {types[index]!r}, "
            f"expected one of {', '.join(sorted(_SERVED_LAYER_TYPES))}{missing_parts(model)}"
        )
    seen = read_window(call.mask)
    if seen is None:
        got = "no mask" if call.mask is None else "a mask of its own"
        raise ValueError(
            f"{where} cannot be served: expected its attention to get the mask that transformers' mask "
            f"function returned, as it is, got {got}; who may attend to whom may depend on the text there"
        )
    if seen < 0:
        raise ValueError(f"{where} cannot be served: its mask is neither causal nor a causal sliding window")
    return replace(call, sliding_window=None if math.isinf(seen) else int(seen))


_POSITIONS = (0, 1, 7, 60)
_TOLERANCE = {torch.float32: 1e-3}
_ROUNDED = 3e-2
"""Largest relative error of queries in narrower types."""


@dataclass
class _Queries(Probe):
    """Records the queries of each layer, ``[H, T, D]``, besides its calls."""

    queries: dict[int, torch.Tensor] = field(default_factory=dict)

    def record(self, module: Any, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.queries[id(module)] = q[0].float()
        return super().record(module, q, *rest)


@torch.inference_mode()
def rotary_frequencies(
    model: PreTrainedModel, layers: Sequence[DecoderLayer]
) -> tuple[tuple[float, ...] | None, ...]:
    """Return the frequencies of each layer's rotary embedding, in the layout of rotated halves.

    They are those of a rotary module of the model that a trial bears out: with attention that returns zeros,
    the queries of one token at several positions have to be the same ones, turned. So interleaved embeddings,
    positions of another kind, and layers without any are distinguished, whatever the family.

    Args:
        model: with weights.

    Returns:
        Radians for each position, for each layer; None if its queries match no known embedding.
    """
    device = next(model.parameters()).device
    vocab_size = model.config.get_text_config().vocab_size
    # Two tokens, since one might be padding, with a zero embedding.
    ids = [11 % vocab_size, 7930 % vocab_size]
    tokens = torch.tensor([ids]).repeat_interleave(len(_POSITIONS), dim=1).to(device)
    position = torch.tensor([_POSITIONS * len(ids)]).to(device)
    seen = _Queries()
    with refusing(model), attending(model, seen):
        model(
            input_ids=tokens,
            position_ids=position,
            attention_mask=placeholder_mask(device),
            use_cache=False,
        )
    known = {
        tuple(buffer.float().tolist())
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and "original" not in name and buffer.ndim == 1
    }
    tolerance = _TOLERANCE.get(model.dtype, _ROUNDED)
    return tuple(
        next((each for each in known if _explains(each, seen.queries[id(layer.attention)], tolerance)), None)
        for layer in layers
    )


def _explains(frequencies: tuple[float, ...], q_HTD: torch.Tensor, tolerance: float) -> bool:
    """Whether queries at other positions are those at position 0, turned by these frequencies."""
    if 2 * len(frequencies) > q_HTD.shape[-1]:
        return False
    by_token = q_HTD.unflatten(1, (-1, len(_POSITIONS)))
    position = torch.tensor(_POSITIONS, dtype=torch.int32, device=q_HTD.device)
    expected = turned(by_token[:, :, :1].expand_as(by_token), turns(position, frequencies))
    error = (expected - by_token).norm() / by_token.norm().clamp(min=1e-12)
    return bool(error <= tolerance) and bool(by_token.norm() > 0)

"""A trial at load: compares a flat batch with transformers' own run of each text alone.

The attention call does not show everything that a model does with a text. Biases that ride on the
mask, positions counted from the mask, layers that mix neighbouring tokens, and attention that looks
ahead do not show there, and would be served wrongly. So a few tiny texts are run both ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from bias_builders import Window, causal_mask
from hpu_duo.modeling.attention import NAME, AttentionCall, LayerKind, Trial, attending, placeholder_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What a model's forward raises when it is handed arguments, or a mask, that it was not written for.
_FORWARD_ERRORS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError, AssertionError)


@contextmanager
def refusing(model: nn.Module) -> Iterator[None]:
    """Turn errors of the model's forward into a ``ValueError`` that says it cannot be served."""
    try:
        yield
    except _FORWARD_ERRORS as error:
        name = type(model).__name__
        raise ValueError(f"{name} cannot be served: it fails on flattened tokens: {error}") from error


NUM_TEXTS = 4
TEXT_LEN = 4
_LAYERS_OF_A_KIND = 2

TOLERANCE = 1e-3
"""Largest relative error of the last norm's output for a token, in float32."""

# Rounding may send a token of a mixture-of-experts model to another expert.
_MAX_ROUNDED_SHARE = 0.125


@torch.inference_mode()
def try_flat_batch(model: PreTrainedModel, calls: Sequence[AttentionCall]) -> None:
    """Run short texts side by side, attending as ``calls`` say, and compare with transformers' own run.

    It runs in float32 whatever the dtype of the weights is, because rounding errors hide flaws and grow in
    deep models. Only one widened layer at a time is in memory, and only two layers of each kind run: 0.9 GB
    and four seconds of one core for an 8B model. The head, which sees one token at a time, is left out.

    Args:
        calls: the attention call of each layer, windows included.

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
    layers = _representatives(model, calls)
    with refusing(model), _only(model, layers) as skipped, _widened(model, layers, skipped):
        with attending(model, trial):
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
    _compare(type(model).__name__, flat.float(), apart.flatten(0, 1).float())


def _representatives(model: nn.Module, calls: Sequence[AttentionCall]) -> list[nn.Module]:
    """The first two layers of each kind, in order; all of them where no one list can be cut short."""
    paths = {id(module): path for path, module in model.named_modules()}
    layers = [model.get_submodule(paths[id(call.module)].rpartition(".")[0]) for call in calls]
    if not any(
        isinstance(module, nn.ModuleList) and set(layers) <= set(module) for module in model.modules()
    ):
        return layers
    chosen: list[nn.Module] = []
    seen: Counter[Hashable] = Counter()
    for layer, call in zip(layers, calls):
        kind = LayerKind(layer, (call.sliding_window, call.softcap, call.scale))
        seen[kind] += 1
        if seen[kind] <= _LAYERS_OF_A_KIND:
            chosen.append(layer)
    return chosen


@contextmanager
def _only(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """The model with these layers alone, where one list holds them all; yields the others.

    The other layers pass their input on. They keep their places, because models look up masks and rotary
    embeddings by a layer's number.
    """
    skipped = [
        layer
        for members in model.modules()
        if isinstance(members, nn.ModuleList) and set(layers) <= set(members)
        for layer in members
        if layer not in layers
    ]
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
    """Refuse weights that are not finite, which would look like a model that does something unseen."""
    if bool(apart.isfinite().all()):
        return
    broken = [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]
    where = f"NaN or infinite values in {broken[0]}" if broken else "an overflow in short texts"
    more = f" and {len(broken) - 1} more weights" if broken[1:] else ""
    raise ValueError(
        f"{type(model).__name__} cannot be served: transformers' own run gives NaN or infinite values; "
        f"expected finite weights, got {where}{more}"
    )


def _compare(name: str, flat: torch.Tensor, apart: torch.Tensor) -> None:
    error = (flat - apart).abs().amax(dim=-1) / apart.abs().amax(dim=-1).clamp(min=1e-6)
    # A NaN is an error too.
    share_wrong = 1 - (error <= TOLERANCE).float().mean().item()
    if share_wrong > _MAX_ROUNDED_SHARE:
        raise ValueError(
            f"{name} cannot be served: texts in one flat batch get other results than transformers gives "
            f"each alone (relative error up to {error.max().item():.2g}); something beside its attention "
            "calls reads masks, counts positions or mixes neighbouring tokens"
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

"""Choice of the heads that retrieve and of those that stream: an engine's pattern and windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bias_builders import Window
from hpu_duo.config import HeadConfig
from hpu_duo.heads import HeadLayout, HeadPattern
from hpu_duo.heads.origin import FINGERPRINT_KEY, check_origin
from hpu_duo.modeling.model_files import has_weights, model_fingerprint, model_name
from hpu_duo.modeling.probe import DecoderLayer


def resolve_pattern(heads: HeadConfig, layers: tuple[DecoderLayer, ...]) -> HeadPattern | None:
    """The binarised head pattern, checked against the model; None when every head is a retrieval head."""
    if heads.pattern is None:
        return None
    pattern = _read(heads.pattern)
    kv_heads = {layer.call.num_kv_heads for layer in layers}
    if len(kv_heads) > 1:
        raise ValueError(f"a head pattern needs equally many key/value heads in every layer, got {kv_heads}")
    pattern.check_shape(len(layers), kv_heads.pop())
    if heads.sink is not None or heads.recent is not None:
        pattern = replace(
            pattern,
            sink=pattern.sink if heads.sink is None else heads.sink,
            recent=pattern.recent if heads.recent is None else heads.recent,
        )
    if heads.sparsity is None and heads.threshold is None:
        if pattern.is_binarised:
            return pattern
        raise ValueError("a head pattern with scores only needs sparsity or threshold, got neither")
    return pattern.binarise(
        sparsity=heads.sparsity, threshold=heads.threshold, tie_break=heads.tie_break, balance=heads.balance
    )


def check_pattern(heads: HeadConfig, model: str | Path) -> tuple[str, ...]:
    """Compare the head pattern's model with a checkpoint, or with a directory that has no weights.

    Returns:
        Notes for the user where there is nothing to compare.

    Raises:
        ValueError: the pattern was made for another model, or it cannot be read.
    """
    if heads.pattern is None:
        return ()
    pattern, directory = _read(heads.pattern), Path(model)
    is_named = FINGERPRINT_KEY in pattern.config
    fingerprint = model_fingerprint(directory) if is_named and has_weights(directory) else None
    note = check_origin(pattern, model_name(directory), fingerprint)
    return () if note is None else (note,)


def _read(pattern: HeadPattern | str | Path) -> HeadPattern:
    return pattern if isinstance(pattern, HeadPattern) else HeadPattern.load(pattern)


def assign_heads(
    layers: tuple[DecoderLayer, ...], pattern: HeadPattern | None, max_len: int
) -> tuple[list[HeadLayout], list[Window | None]]:
    """Return the heads of each layer that stream, and their window.

    A sliding-window layer streams with all heads and no sink, whatever the pattern says of it;
    unless its window is no shorter than any request, for then it is a layer of full attention.
    """
    layouts: list[HeadLayout] = []
    windows: list[Window | None] = []
    for index, layer in enumerate(layers):
        call = layer.call
        order = tuple(range(call.num_kv_heads))
        if call.sliding_window is not None and call.sliding_window < max_len:
            layouts.append(HeadLayout(order, 0, call.num_heads))
            windows.append(Window(0, call.sliding_window).validate())
        elif pattern is not None:
            layout = HeadLayout.from_mask(pattern.mask[index], call.num_heads)
            layouts.append(layout)
            window = Window(pattern.sink, pattern.recent).validate().clipped(max_len)
            windows.append(window if layout.num_streaming else None)
        else:
            layouts.append(HeadLayout(order, call.num_kv_heads, call.num_heads))
            windows.append(None)
    return layouts, windows

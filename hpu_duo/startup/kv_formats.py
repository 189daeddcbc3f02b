"""Choice of the formats in which heads store keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hpu_duo.config.limits import SLIDING_WINDOW, CacheConfig
from hpu_duo.kv.plan import LayerKV, in_format
from hpu_duo.modeling.attention import AttentionCall
from hpu_duo.modeling.precision import Precision
from hpu_duo.modeling.probe import DecoderLayer
from hpu_duo.modeling.quantised.execution import inc_scales
from hpu_duo.modeling.quantised.hpu import GAUDI2_MAX, is_gaudi2
from hpu_duo.modeling.quantised.inc import VARIABLE, IncScales, quant_config, read_inc
from hpu_duo.modeling.quantised.kv_scales import kv_scales
from hpu_duo.parallel.head_exchange import ContextParallelBlocks
from hpu_duo.startup.heads import HeadAssignment
from kernels_ref import PLAIN, Blocks, Budget, GroupKind, Implementation, KVFormat, LayerSpec, Owner, Rings
from kernels_ref.formats import INC, LATENT, ROUNDED, format_of, within
from kernels_ref.formats.fp8 import LARGEST, Fp8
from kernels_ref.x86 import library as x86


def with_formats(
    heads: Sequence[HeadAssignment],
    layers: Sequence[DecoderLayer],
    cache: CacheConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[HeadAssignment, ...]:
    """Return the heads of all layers with the formats of their keys and values.

    Args:
        layers: of the same model.
        dtype: of the model.
        device: that stores them.

    Raises:
        ValueError: a layer to skip does not exist, or heads cannot store their keys in a format.
    """
    skipped = set(map(str, cache.kv_cache_dtype_skip_layers))
    numbers = [layer.number for layer in layers]
    if unknown := skipped - {SLIDING_WINDOW, *map(str, numbers)}:
        known = f"0 to {len(layers) - 1}, the layers of this model"
        if numbers != list(range(len(layers))):
            known = f"{', '.join(map(str, numbers))}, the layers of this model that attend"
        raise ValueError(f"expected kv_cache_dtype_skip_layers of {known}, got {', '.join(sorted(unknown))}")
    of_blocks, of_rows = (_served(name, dtype, device) for name in (cache.kv_cache_dtype, cache.ring_dtype))
    found = []
    for number, each, layer in zip(numbers, heads, layers):
        has_window = layer.call.sliding_window is not None
        is_skipped = str(number) in skipped or (has_window and SLIDING_WINDOW in skipped)
        chosen = (PLAIN, PLAIN) if is_skipped else (of_blocks, of_rows)
        if any(group.format == LATENT for group in each.groups):
            _check_latents(chosen, number)
        for kv_format in chosen:
            _check_sizes(kv_format, layer.call, number)
        found.append(each._replace(groups=in_format(each.groups, *chosen)))
    return tuple(found)


def unused_note(specs: Iterable[LayerSpec], cache: CacheConfig, dtype: torch.dtype) -> tuple[str, ...]:
    """Return a sentence for the user for each format that was chosen and that no head has.

    Args:
        dtype: of the model.
    """
    kept = {(group.kind.owner is Owner.BLOCK, group.format.name) for spec in specs for group in spec.groups}
    others = ("in rings or with a budget", "without either")
    notes = []
    for setting, other, owns_blocks in zip(("kv_cache_dtype", "ring_dtype"), others, (True, False)):
        name = getattr(cache, setting)
        chosen = _served(name, dtype, None)
        if not chosen.is_plain and (owns_blocks, chosen.name) not in kept:
            notes.append(
                f"{setting} {name!r} is not used: all heads are {other}, or in layers that "
                "kv_cache_dtype_skip_layers names"
            )
    return tuple(notes)


def scales_of(
    path: str | Path,
    specs: Sequence[LayerSpec],
    layers: Sequence[LayerKV],
    numbers: Sequence[int],
    cache: CacheConfig,
) -> tuple[tuple[float, float] | None, ...]:
    """Return the constants that keys and values of each layer are divided by, if their formats take them.

    They are those of files of Intel Neural Compressor for its format, else of the user's file, else of the
    checkpoint.

    Args:
        path: of the checkpoint.
        numbers: of the layers among all layers of the model.

    Raises:
        ValueError: see ``kv_scales`` and ``IncScales.kv``; or the user's file has none.
    """
    # A layer that reads the stores of another one has its scales.
    sources = [
        numbers[index if kv.source is None else kv.source]
        if any(group.format.takes_scales for group in spec.groups)
        else None
        for index, (spec, kv) in enumerate(zip(specs, layers))
    ]
    wanted = [source for source in sources if source is not None]
    found = None
    if not wanted:
        return (None,) * len(specs)
    if INC in (cache.kv_cache_dtype, cache.ring_dtype):
        found = _inc_files().kv(wanted)
    elif cache.kv_scales is None:
        found = kv_scales(path, wanted)
    elif (found := kv_scales(cache.kv_scales, wanted)) is None:
        raise ValueError(
            f"expected kv_scales to be a directory that hpu-duo calibrate --kv-scales has written, got "
            f"{str(cache.kv_scales)!r}, which has no *.safetensors with k_scale and v_scale"
        )
    if found is None:
        return (None,) * len(specs)
    if INC not in (cache.kv_cache_dtype, cache.ring_dtype):
        spec_of = dict(zip(numbers, specs))
        found = {number: _scaled(spec_of[number], pair) for number, pair in found.items()}
    return tuple(None if source is None else found[source] for source in sources)


def scales_note(
    specs: Iterable[LayerSpec], scales: Iterable[object], cache: CacheConfig, path: str | Path
) -> tuple[str, ...]:
    """Return a sentence on where constant scales of keys and values are from; nothing where none are used.

    Args:
        scales: of each layer; None = 1.
        path: of the checkpoint.
    """
    if not any(group.format.takes_scales for spec in specs for group in spec.groups):
        return ()
    if all(each is None for each in scales):
        return ("keys and values in fp8 have a scale of 1: hpu-duo calibrate --kv-scales measures others",)
    source: object = path if cache.kv_scales is None else cache.kv_scales
    if INC in (cache.kv_cache_dtype, cache.ring_dtype):
        source = quant_config("kv_cache_dtype='fp8_inc'")
    return (f"keys and values in fp8 are divided by the scales of {source}",)


def _scaled(spec: LayerSpec, scales: tuple[float, float]) -> tuple[float, float]:
    """Return scales of numbers up to 448 for those up to which the heads of a layer store."""
    stored = [x for group in spec.groups for x in (group.format.keys, group.format.values)]
    more = LARGEST / min((x.largest for x in stored if isinstance(x, Fp8)), default=LARGEST)
    return scales[0] * more, scales[1] * more


def stored_cache(
    cache: CacheConfig,
    precision: Precision,
    heads: Sequence[HeadAssignment],
    layers: Sequence[DecoderLayer],
    impl: Implementation,
) -> CacheConfig:
    """Return the settings of the stores, with the checkpoint's dtype for "auto" where kernels read it.

    Plain floats are in the dtype of activations.

    Args:
        layers: of the same model.
        impl: the kernels that attend.
    """
    narrow = ROUNDED.get(precision.kv)
    if precision.kv == precision.arithmetic or narrow is None or impl is not Implementation.SDPA:
        return cache
    kinds = {group.kind for each in heads for group in each.groups}
    dims = {(layer.call.head_dim, layer.call.value_head_dim) for layer in layers}
    if not (all(map(_is_in_place, kinds)) and all(_is_read(*each, precision) for each in dims)):
        return cache
    names = (narrow.name if name == PLAIN.name else name for name in (cache.kv_cache_dtype, cache.ring_dtype))
    return replace(cache, kv_cache_dtype=next(names), ring_dtype=next(names))


def _is_in_place(kind: GroupKind) -> bool:
    """Whether our kernels read all units of a kind; torch's operators would widen whole stores."""
    if isinstance(kind, Blocks):
        return kind.rule is None and kind.takes_any_format
    return isinstance(kind, Rings | Budget | ContextParallelBlocks) and kind.takes_any_format


def _is_read(head_dim: int, value_dim: int, precision: Precision) -> bool:
    """Whether our kernels read keys and values of the checkpoint's dtype with queries of another one."""
    q, k = (torch.empty(1, 1, 1, head_dim, dtype=x) for x in (precision.arithmetic, precision.kv))
    v = q.new_empty(1, 1, 1, value_dim)
    return x86.fits_rows(q, k, v) and x86.fits_tiles(q, q[0], v[0])


def _served(name: str, dtype: torch.dtype, device: torch.device | None) -> KVFormat:
    """Return the format of a name, with a device's fp8 numbers, or plain floats if it is the model's dtype.

    Raises:
        ValueError: there is none, or its files cannot be read.
    """
    if name == str(dtype).removeprefix("torch."):
        return PLAIN
    found = format_of(name)
    if device is None:
        return found
    if name == INC:
        return within(found, _inc_files().largest)
    return within(found, GAUDI2_MAX) if device.type == "hpu" and is_gaudi2(device) else found


def _inc_files() -> IncScales:
    return read_inc(quant_config(f"kv_cache_dtype {INC!r}"))


def check_scales(cache: CacheConfig, device: torch.device) -> None:
    """Check files of scales of keys and values before anything else is read.

    Raises:
        ValueError: they cannot be read, or do not go with the format; or they are for another device.
    """
    names = (cache.kv_cache_dtype, cache.ring_dtype)
    if cache.kv_scales is not None and INC in names:
        raise ValueError(f"expected kv_scales or kv_cache_dtype {INC!r}, whose scales are in {VARIABLE}")
    if cache.kv_scales is not None and not any(format_of(name).takes_scales for name in names):
        raise ValueError(
            f"kv_scales={str(cache.kv_scales)!r} needs a kv_cache_dtype of fp8, whose scales are constants, "
            f"got {cache.kv_cache_dtype!r}"
        )
    if INC in names:
        inc_scales(f"kv_cache_dtype {INC!r}", device)


def _check_latents(chosen: Iterable[KVFormat], number: int) -> None:
    for setting, kv_format in zip(("kv_cache_dtype", "ring_dtype"), chosen):
        if not kv_format.is_plain:
            raise ValueError(
                f"{setting} {kv_format.name!r} is not served for latents, whose rotary part needs a scale of "
                f"its own: expected {PLAIN.name!r}, or layer {number} in kv_cache_dtype_skip_layers"
            )


def _check_sizes(kv_format: KVFormat, call: AttentionCall, number: int) -> None:
    try:
        kv_format.tensor_names(call.head_dim, call.value_head_dim)
    except ValueError as error:
        raise ValueError(f"kv_cache_dtype {kv_format.name!r} of layer {number}: {error}") from None

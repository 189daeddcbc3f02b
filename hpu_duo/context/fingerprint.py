"""All that keys and values depend on besides tokens, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from hpu_duo.kv.transfer import tensors_of
from hpu_duo.modeling.model_files import model_fingerprint
from hpu_duo.modeling.rope import served_len, short_len

if TYPE_CHECKING:
    from hpu_duo.generation import GenerativeModel

_MOST_SHOWN = 60


def fingerprint_of(model: GenerativeModel) -> dict[str, str]:
    """Collect weights, heads, dtype, sizes of units, softmax and rotary frequencies, as texts by name.

    Device, kernels and versions of software are left out: they change numbers by rounding only.
    """
    engine, config = model.engine, model.engine_config
    text, pattern = model.config.get_text_config(), engine.pattern
    longest, short = served_len(text, config.scheduler.max_model_len), short_len(text)
    found = {
        "model": model_fingerprint(Path(config.model.path)),
        "head pattern": "none",
        "dtype": str(model.dtype).removeprefix("torch."),
        "block_size": str(engine.scheduler.limits.block_size),
        "softmax": ", ".join(sorted({spec.softmax.value for spec in engine.runner.model.specs})),
        "rotary frequencies of texts of": "any length" if short is None else f"{max(longest, short)} tokens",
    }
    if pattern is not None:
        heads = [pattern.sink, pattern.recent, pattern.mask.astype(int).tolist()]
        found["head pattern"] = json.dumps(heads)
    for each in tensors_of(engine.runner.store):
        kind = f"{each.kind.name} {each.kind.describe()}".strip()
        found[each.name] = f"{kind} x {list(each.unit_shape)}"
    return found


def check_fingerprint(path: Path, saved: object, model: GenerativeModel) -> None:
    """Raise ValueError, which names what differs, unless a saved context is of a model like this one."""
    got = fingerprint_of(model)
    if not isinstance(saved, dict):
        raise ValueError(f"{path}: expected the fingerprint of a model, got {type(saved).__name__}")
    for name in {**got, **saved}:
        if saved.get(name) != got.get(name):
            raise ValueError(
                f"{path}: expected a context of a model like this one, with {name} {_short(got.get(name))}, "
                f"got one with {_short(saved.get(name))}"
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 4] + " ..."

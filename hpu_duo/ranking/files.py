"""Rankers on disk: a directory with ``ranker.json`` and ``model.safetensors``."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hpu_duo.ranking.encoder import EncoderRanker
from hpu_duo.ranking.linear import LinearRanker
from hpu_duo.ranking.ranker import Ranker

_KINDS: dict[str, type[Ranker]] = {one.kind: one for one in (LinearRanker, EncoderRanker)}
_SETTINGS, _WEIGHTS = "ranker.json", "model.safetensors"


def save_ranker(ranker: Ranker, directory: Path) -> None:
    """Write a ranker to a directory, which is made if it is not there.

    Raises:
        ValueError: the files cannot be written, or would replace others.
    """
    check_free(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: each.contiguous() for name, each in ranker.state_dict().items()}, directory / _WEIGHTS
        )
        settings = json.dumps({"kind": ranker.kind, **ranker.settings}, indent=1)
        (directory / _SETTINGS).write_text(settings, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write a ranker to {directory}: {error}") from error


def check_free(directory: Path) -> None:
    """Refuse a directory that has a model.

    Raises:
        ValueError: it has one.
    """
    if any((directory / name).exists() for name in (_SETTINGS, _WEIGHTS)):
        raise ValueError(f"expected a directory without a model, and {directory} has one")


def load_ranker(directory: Path) -> Ranker:
    """Read a ranker from a directory.

    Raises:
        ValueError: it has none, or one that cannot be read.
    """
    try:
        settings = json.loads((directory / _SETTINGS).read_text(encoding="utf-8"))
        kind = _KINDS[settings.pop("kind")]
        ranker = kind(**settings)
        ranker.load_state_dict(load_file(directory / _WEIGHTS))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"expected a ranker of hpu-duo train-ranker in {directory}, got: {type(error).__name__}: {error}"
        ) from error
    return ranker.eval()

"""The published file format of a head pattern: a directory with a table of scores and a configuration.

Legend: L layers, K KV heads of a layer.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCORES_FILE = "full_attention_heads.tsv"
CONFIG_FILE = "config.json"
# Not part of the published format: written beside it, so that a run can be repeated without the rule.
RETRIEVAL_FILE = "retrieval_heads.tsv"


def read_directory(directory: Path) -> tuple[NDArray[np.float64], NDArray[np.float64] | None, dict[str, Any]]:
    """Read the scores [L, K], the 0/1 mask [L, K] if there is one, and the configuration.

    Raises ValueError for a missing or malformed file, naming it; the configuration must have ``sink_size``
    and ``recent_size``.
    """
    missing = [name for name in (SCORES_FILE, CONFIG_FILE) if not (directory / name).is_file()]
    if missing:
        raise ValueError(
            f"expected {SCORES_FILE} and {CONFIG_FILE} in {directory}, got no {', '.join(missing)}"
        )
    mask_file = directory / RETRIEVAL_FILE
    return (
        _read_table(directory / SCORES_FILE),
        _read_table(mask_file) if mask_file.is_file() else None,
        _read_config(directory / CONFIG_FILE),
    )


def write_directory(
    directory: Path, scores: NDArray[Any], retrieval: NDArray[np.bool_] | None, config: Mapping[str, Any]
) -> None:
    """Write what ``read_directory`` reads, creating the directory; without a mask, remove an old one."""
    directory.mkdir(parents=True, exist_ok=True)
    np.savetxt(directory / SCORES_FILE, scores, delimiter="\t")
    (directory / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    if retrieval is None:
        (directory / RETRIEVAL_FILE).unlink(missing_ok=True)
    else:
        np.savetxt(directory / RETRIEVAL_FILE, retrieval, fmt="%d", delimiter="\t")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8 text in {path}, got: {error}") from error


def _read_config(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f"expected JSON in {path}, got: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"expected an object in {path}, got {type(config).__name__}")
    missing = [key for key in ("sink_size", "recent_size") if key not in config]
    if missing:
        raise ValueError(
            f"expected the keys sink_size and recent_size in {path}, got no {', '.join(missing)}"
        )
    return config


def _read_table(path: Path) -> NDArray[np.float64]:
    lines = _read_text(path).splitlines()
    try:
        rows = [[float(cell) for cell in line.split("\t")] for line in lines if line.strip()]
    except ValueError as error:
        raise ValueError(f"expected tab-separated numbers in {path}, got: {error}") from error
    widths = sorted({len(row) for row in rows})
    if len(widths) != 1:
        raise ValueError(f"expected lines of one length in {path}, got {len(rows)} lines of lengths {widths}")
    return np.array(rows, dtype=np.float64)

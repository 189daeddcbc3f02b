"""Load the model that the options of a command describe."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.cli.options import CUT, is_cut
from hpu_duo.config.limits import SchedulerConfig
from hpu_duo.config.overrides import EngineOverrides
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from hpu_duo.heads import HeadPattern
    from hpu_duo.llm import HPUDuoModel


def load_model(
    path: Path | None,
    given: EngineOverrides,
    num_requests: int = SchedulerConfig.max_num_seqs,
    seed: int = 0,
) -> HPUDuoModel:
    """Load the model that the options describe, and warm it up if nothing may be compiled afterwards.

    Args:
        path, given, num_requests, seed: see ``load_cold``.

    Raises:
        ValueError: see ``load_cold``.
    """
    loaded = load_cold(path, given, num_requests, seed)
    if given.get("fail_on_recompile"):
        loaded.warmup()
    return loaded


def load_cold(
    path: Path | None,
    given: EngineOverrides,
    num_requests: int = SchedulerConfig.max_num_seqs,
    seed: int = 0,
) -> HPUDuoModel:
    """Load the model that the options describe, and keep other libraries from the terminal.

    Args:
        path: None is the built-in model, whose own pattern is used when sparsity or threshold are given
            without a pattern.
        given: settings of the engine.
        num_requests: expected requests, the default of ``max_num_seqs`` unless the buckets are a manifest,
            which has its own.
        seed: for requests without a seed.

    Raises:
        ValueError: the files or the options do not fit together; see ``HPUDuoModel.from_pretrained``.
    """
    for name, file in (
        ("--record-shapes", given.get("record_shapes")),
        ("--record-steps", given.get("record_steps")),
    ):
        if file is not None:
            check_file(name, Path(file))
    settings: EngineOverrides = {**with_own_pattern(path, given), "seed": seed}
    if "max_num_seqs" not in settings:
        settings["max_num_seqs"] = _max_num_seqs(settings, num_requests)
    # Everything that needs torch comes after what can be refused without it.
    from transformers.utils import logging

    from hpu_duo.llm import HPUDuoModel

    # torch's notes to developers would stand between the user's text and the table.
    warnings.filterwarnings("ignore", message=".* is in beta and the API may change", category=UserWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return HPUDuoModel.from_pretrained(MODEL_DIR if path is None else path, **settings)


def with_own_pattern(path: Path | None, given: EngineOverrides) -> EngineOverrides:
    """Return settings with the built-in model's pattern, where its heads are cut and none is given."""
    if path is None and is_cut(given) and given.get("pattern") is None:
        return {**given, "pattern": PATTERN_DIR}
    return {**given}


def with_pattern(given: EngineOverrides, pattern: HeadPattern | None) -> EngineOverrides:
    """Return settings with a pattern to take as it is, or none, whatever the options say of heads."""
    others = {name: value for name, value in given.items() if name not in CUT}
    own = {} if pattern is None else {"pattern": pattern, "max_layer_kinds": pattern.num_layers}
    return cast(EngineOverrides, {**others, **own})


def _max_num_seqs(given: EngineOverrides, num_requests: int) -> int:
    from graphs.manifest import is_manifest, read_manifest

    buckets = given.get("buckets")
    if isinstance(buckets, str | Path) and is_manifest(buckets):
        limit = read_manifest(buckets).configuration.get("limits.max_num_seqs")
        if isinstance(limit, int):
            return limit
    return min(num_requests, SchedulerConfig.max_num_seqs)

"""Facts that all ranks must have alike before they compute anything: model, versions, settings and plan."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from graphs import BucketTable
from hpu_duo.config import EngineConfig
from hpu_duo.device import DeviceRuntime
from hpu_duo.device.ranks import Membership
from hpu_duo.heads import HeadPattern
from hpu_duo.kv_plan import KVPlan
from hpu_duo.modeling.model_files import model_fingerprint

_OF_ITS_OWN = ("path", "pattern", "kv_plan", "ranker")
"""Settings that may differ: places of files, whose contents are compared, or that rank 0 alone reads."""


def check_alike(config: EngineConfig, runtime: DeviceRuntime, membership: Membership) -> None:
    """Check that all ranks have the same model, versions and settings.

    Raises:
        RankError: they differ; the message names what differs, and the ranks.
    """
    membership.compare_all(facts_of(config, runtime))


def facts_of(config: EngineConfig, runtime: DeviceRuntime) -> dict[str, str]:
    """Return the facts that ranks compare before they load anything, by name."""
    return {
        "model (config.json and weights, by model_fingerprint)": model_fingerprint(Path(config.model.path)),
        "version of torch": torch.__version__,
        "version of transformers": transformers.__version__,
        "version of hpu-duo": version("hpu-duo"),
        "version of Python": platform.python_version(),
        "version of the device and its software": runtime.version(),
        **settings_of(config),
    }


def check_same_pattern(pattern: HeadPattern | None, membership: Membership) -> None:
    """Check that all ranks cut the heads of a model alike.

    Raises:
        RankError: they do not; the message names the ranks.
    """
    membership.compare("head pattern (by a digest)", pattern_digest(pattern))


def check_same_plan(plan: KVPlan | None, membership: Membership) -> None:
    """Check that all ranks have the same KV plan.

    Raises:
        RankError: they do not; the message names the ranks.
    """
    membership.compare("KV plan (by a digest)", plan_digest(plan))


def plan_digest(plan: KVPlan | None) -> str:
    """Return a digest of what each head keeps."""
    return "no plan" if plan is None else hashlib.sha256(repr(plan.as_dict()).encode()).hexdigest()


def settings_of(config: EngineConfig) -> dict[str, str]:
    """Return the settings of an engine by name, as texts that are equal where the settings are."""
    sections = [getattr(config, each.name) for each in fields(config)]
    return {
        f"setting {each.name}": _text(getattr(section, each.name))
        for section in sections
        for each in fields(section)
        if each.name not in _OF_ITS_OWN
    }


def _text(value: Any) -> str:
    if isinstance(value, BucketTable):
        return f"a table of {len(value)} buckets, {hashlib.sha256(str(list(value)).encode()).hexdigest()}"
    # A capture backend of the user's own, which would be told by its address.
    return str(getattr(value, "name", value))


def pattern_digest(pattern: HeadPattern | None) -> str:
    """Return a digest of the heads that retrieve and of the window of others."""
    if pattern is None:
        return "every head retrieves"
    words = f"{pattern.sink} {pattern.recent} {pattern.mask.shape} ".encode()
    return hashlib.sha256(words + pattern.mask.tobytes()).hexdigest()

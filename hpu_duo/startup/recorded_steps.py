"""Recordings of steps in a file, with a description of their engine."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from graphs import BatchShape, BucketTable, StepCost
from graphs.backends import BACKEND_NAMES
from hpu_duo.config.engine import EngineConfig
from hpu_duo.config.kv_plan import KVPlan
from hpu_duo.engine.engine import Engine
from hpu_duo.engine.step_input import StepInput
from hpu_duo.heads import HeadPattern
from hpu_duo.modeling.hub import model_fingerprint
from hpu_duo.sampling import SamplingBatch, SamplingRoute
from hpu_duo.startup.warm_up_estimate import configuration_of, versions_of
from kernels_ref import KVFormat

VERSION = 3
"""Version of the format; others are an error."""

_FORMAT = b"hpu-duo steps "
_INTS, _FLOATS = np.dtype("<i4"), np.dtype("<f4")
_LONGEST_LINE = 1 << 26


class CutLogError(ValueError):
    """The file ends inside of a step; all steps before it are whole."""


@dataclass(frozen=True)
class LoggedStep:
    """A step and its tokens.

    Attributes:
        message: the step.
        token_ids: the tokens of ``message.sampled``, int32 ``[S]``.
    """

    message: StepInput
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True)
class StepLog:
    """A file with steps; iterating reads it from the beginning.

    Attributes:
        path: the file.
        origin: description of the engine that ran the steps; see ``origin_of``.
    """

    path: Path
    origin: Mapping[str, Any]

    def __iter__(self) -> Iterator[LoggedStep]:
        """Yield the steps in order.

        Raises:
            CutLogError: the last step is incomplete, as of a process that was killed while writing; raised
                after all complete steps.
            ValueError: the file cannot be read, or a step is damaged; the message names which.
        """
        with _opened(self.path) as file:
            for _ in range(2):
                _line(file)
            number = 0
            while head := _line(file):
                number += 1
                if not head.endswith(b"\n"):
                    got = f"got {len(head)} bytes without one"
                    raise CutLogError(f"{self.path} ends inside of step {number}: expected a line, {got}")
                try:
                    yield _step(head, file)
                except CutLogError as error:
                    raise CutLogError(f"{self.path} ends inside of step {number}: {error}") from None
                except (KeyError, TypeError, ValueError, OverflowError) as error:
                    raise ValueError(f"{self.path}: step {number} is damaged: {error}") from error


def read_log(path: str | Path) -> StepLog:
    """Open a file with recorded steps.

    Raises:
        ValueError: it cannot be read, is something else, or of another version of the format.
    """
    path = Path(path)
    with _opened(path) as file:
        first, second = _line(file), _line(file)
    if not first.startswith(_FORMAT):
        raise ValueError(f"expected recorded steps in {path}, got something else")
    version = first[len(_FORMAT) :].strip().decode(errors="replace")
    if version != str(VERSION):
        raise ValueError(f"expected recorded steps of version {VERSION} in {path}, got version {version}")
    if not second.endswith(b"\n"):
        raise ValueError(f"expected recorded steps in {path}, got no step")
    try:
        origin = json.loads(_unsealed(second))
    except ValueError as error:
        raise ValueError(f"{path}: the description of the engine is damaged: {error}") from None
    if not isinstance(origin, dict):
        raise ValueError(f"expected recorded steps in {path}, got no description of what they are of")
    return StepLog(path, origin)


class StepRecorder:
    """Writes steps to a file, from an engine's first one on.

    Args:
        path: created; an older recording is replaced.
        origin: returns the description of the engine; called with the first step.

    Raises:
        ValueError: the file cannot be written, or is no recording.
    """

    def __init__(self, path: str | Path, origin: Callable[[], Mapping[str, Any]]) -> None:
        self.path = Path(path)
        self._origin: Callable[[], Mapping[str, Any]] | None = origin
        self._error: Exception | None = None
        if self.path.is_file() and self.path.stat().st_size:
            with _opened(self.path) as file:
                if not _line(file).startswith(_FORMAT):
                    raise ValueError(f"expected recorded steps to replace in {path}, got something else")
        try:
            self._file: BinaryIO | None = self.path.open("wb", buffering=0)
        except OSError as error:
            raise ValueError(f"cannot record steps in {path}: {error.strerror}") from error

    def add(self, message: StepInput, token_ids: npt.NDArray[np.int32]) -> None:
        """Append a step that has run.

        Raises:
            OSError: it cannot be written whole.
            Exception: ``origin`` has raised it. Either way the file ends before this step, and every later
                call raises the same: a recording with a step missing could not be replayed.
        """
        if self._file is None:
            raise self._error or OSError(f"the recording in {self.path} has been closed")
        start = self._file.tell()
        try:
            data = _bytes(message, token_ids)
            if self._origin is not None:
                data = b"%s%d\n" % (_FORMAT, VERSION) + _sealed(self._origin()) + data
            self._write(data)
        except Exception as error:
            os.ftruncate(self._file.fileno(), start)
            self.close()
            self._error = error
            raise
        self._origin = None

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, data: bytes) -> None:
        assert self._file is not None, "checked by add"
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()


def _bytes(message: StepInput, token_ids: npt.NDArray[np.int32]) -> bytes:
    sampling = message.sampling
    floats = np.zeros(0, np.float32) if sampling is None else sampling.floats
    masks = np.zeros(0, np.int32) if sampling is None or sampling.masks is None else sampling.masks
    arrays = b"".join(
        (
            message.ints.astype(_INTS).tobytes(),
            floats.astype(_FLOATS).tobytes(),
            masks.astype(_INTS).tobytes(),
        )
    )
    head = {
        "shape": str(message.shape),
        "bucket": str(message.bucket),
        "block_copies": message.num_block_copies,
        "row_copies": message.num_row_copies,
        "route": None if sampling is None else asdict(sampling.route),
        "sampled": message.sampled.tolist(),
        "hosted": list(message.host_sampled),
        "tokens": token_ids.tolist(),
        "num_ints": len(message.ints),
        "num_floats": len(floats),
        "num_masks": masks.size,
        "crc": zlib.crc32(arrays),
    }
    if message.has_sources:
        # Such a step without drafts of its own takes tokens of the one before it.
        head |= {"sources": True, "drafts": message.num_drafts}
    return _sealed(head) + arrays


def _sealed(parts: Mapping[str, Any]) -> bytes:
    """A line of JSON with its checksum."""
    text = json.dumps(parts).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _unsealed(line: bytes) -> bytes:
    """The JSON of a line.

    Raises:
        ValueError: it is not what was written.
    """
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    _check(b"%08x" % zlib.crc32(text), checksum)
    return text


def _check(found: bytes, written: bytes) -> None:
    if found != written:
        named = written[:8].decode(errors="replace")
        raise ValueError(f"expected the checksum that was written, {named}, got {found.decode()}")


def _step(head: bytes, file: BinaryIO) -> LoggedStep:
    """Read the rest of a step after its first line.

    Raises:
        CutLogError: the file ends within it.
        ValueError: it is damaged.
    """
    parts = json.loads(_unsealed(head))
    sizes = [int(parts[f"num_{name}"]) for name in ("ints", "floats", "masks")]
    arrays = [file.read(4 * size) for size in sizes]
    num_bytes = sum(map(len, arrays))
    if num_bytes < 4 * sum(sizes):
        raise CutLogError(f"expected {4 * sum(sizes)} bytes of arrays, got {num_bytes}")
    _check(b"%08x" % zlib.crc32(b"".join(arrays)), b"%08x" % parts["crc"])
    ints, floats, masks = arrays
    route = parts["route"]
    message = StepInput(
        BatchShape.parse(parts["shape"]),
        BatchShape.parse(parts["bucket"]),
        np.frombuffer(ints, _INTS).astype(np.int32),
        int(parts["block_copies"]),
        int(parts["row_copies"]),
        None if route is None else _sampling(SamplingRoute(**route), floats, masks),
        np.array(parts["sampled"], np.int32),
        tuple(map(int, parts["hosted"])),
        bool(parts.get("sources", False)),
        int(parts.get("drafts", 0)),
    )
    return LoggedStep(message, np.array(parts["tokens"], np.int32))


def _sampling(route: SamplingRoute, floats: bytes, masks: bytes) -> SamplingBatch:
    words = np.frombuffer(masks, _INTS).astype(np.int32)
    return SamplingBatch(
        route,
        np.frombuffer(floats, _FLOATS).astype(np.float32),
        words.reshape(route.num_rows, -1) if route.has_masks else None,
    )


def _line(file: BinaryIO) -> bytes:
    return file.readline(_LONGEST_LINE)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ValueError(f"cannot read recorded steps from {path}: {error.strerror}") from error


_MOST_SHOWN = 3


def origin_of(engine: Engine, config: EngineConfig) -> dict[str, Any]:
    """Describe an engine, as JSON has it.

    Args:
        config: of the engine.

    Returns:
        A mapping with: ``fingerprint``, all that must be equal, flat; ``versions`` of software, with which
        numbers may differ; ``options``, arguments of ``from_pretrained`` besides model, buckets and heads;
        ``buckets``, the table, None without one; ``heads``, the head pattern, None if all retrieve.
    """
    runner = engine.runner
    resolved, graphs = engine.stats().resolved, runner.graphs
    limits = resolved.limits
    return {
        "fingerprint": fingerprint_of(engine, config.model.path),
        "versions": versions_of(runner.runtime),
        "options": {
            "device": runner.runtime.name,
            "dtype": resolved.dtype,
            "attention": resolved.attention,
            "softmax": resolved.softmax,
            "pack_weights": config.model.pack_weights,
            "graphs": graphs.backend.name if graphs.backend.name in BACKEND_NAMES else "auto",
            "on_miss": resolved.on_miss,
            "max_captured_tokens": resolved.max_captured_tokens,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_model_len": limits.max_model_len,
            "max_chunk_rows": limits.max_chunk_rows,
            "decode_len": limits.decode_len,
            "speculative_config": config.scheduler.speculative_config,
            "block_size": limits.block_size,
            "num_blocks": limits.num_blocks or None,
            "enable_prefix_caching": limits.caches_prefixes,
            "num_prefix_snapshots": limits.num_snapshots if limits.caches_prefixes else None,
            "kv_policy": config.cache.kv_policy,
            "kv_budget": config.cache.kv_budget,
            "kv_plan": _plan(config.cache.kv_plan),
            "kv_prompt": config.cache.kv_prompt,
            "kv_chunk": config.cache.kv_chunk,
            "kv_cache_dtype": config.cache.kv_cache_dtype,
            "kv_cache_dtype_skip_layers": config.cache.kv_cache_dtype_skip_layers,
            "kv_scales": None if config.cache.kv_scales is None else str(config.cache.kv_scales),
            "ring_dtype": config.cache.ring_dtype,
            "attention_rule": config.heads.attention_rule,
            "max_ring_window": config.heads.max_ring_window,
        },
        "buckets": [str(bucket) for bucket in graphs.table] if runner.executor.uses_table else None,
        "heads": _heads(engine.pattern),
    }


def fingerprint_of(engine: Engine, model: str | Path) -> dict[str, Any]:
    """Collect all that a message relies on: weights, heads, dtype, kernels, capture, layout of the stores."""
    runner = engine.runner
    layouts = {
        f"layout.layer_{number}": ", ".join(
            (
                *(
                    f"{group.kind.name} {list(units.layout)}{_stored(group.format)}"
                    for group, units in zip(layer.groups, cache)
                ),
                *(kind.name for kind in layer.rows),
            )
        )
        for number, (layer, cache) in enumerate(zip(runner.store.plan.layers, runner.store.layers))
    }
    return {
        "checkpoint": model_fingerprint(Path(model)),
        "heads": _heads(engine.pattern),
        **configuration_of(engine),
        **layouts,
    }


def _stored(kv_format: KVFormat) -> str:
    return "" if kv_format.is_plain else f" {kv_format.name}"


def options_of(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``HPUDuoModel.from_pretrained``, besides the model, for an engine of this origin.

    Raises:
        ValueError: the description lacks them.
    """
    try:
        options, buckets, heads = dict(origin["options"]), origin["buckets"], origin["heads"]
        if buckets is not None:
            shapes = tuple(map(BatchShape.parse, buckets))
            options["buckets"] = BucketTable(shapes, StepCost(block_size=options["block_size"]))
        if heads is not None:
            mask = np.array(heads["retrieval"], np.bool_)
            options["pattern"] = HeadPattern(
                mask.astype(np.float32), heads["sink"], heads["recent"], "recorded steps", mask
            )
            # These are the heads that the engine had in the end.
            options["max_layer_kinds"] = len(mask)
        if options.get("kv_plan") is not None:
            options["kv_plan"] = KVPlan.from_dict(options["kv_plan"])
        return options
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected recorded steps with the options of their engine, got {error}") from error


def check_origin(origin: Mapping[str, Any], engine: Engine, model: str | Path) -> None:
    """Raise ValueError unless steps of this origin can be executed by an engine."""
    # As JSON has it: tuples are lists there.
    expected, got = origin.get("fingerprint", {}), json.loads(json.dumps(fingerprint_of(engine, model)))
    differing = [
        f"{name}: {_text(expected.get(name))}, not {_text(got.get(name))}"
        for name in {**expected, **got}
        if expected.get(name) != got.get(name)
    ]
    if differing:
        shown = "; ".join(differing[:_MOST_SHOWN])
        more = f"; and {len(differing) - _MOST_SHOWN} more" if len(differing) > _MOST_SHOWN else ""
        raise ValueError(f"expected an engine like the one whose steps were recorded, {shown}{more}")


def differing_versions(origin: Mapping[str, Any], engine: Engine) -> list[str]:
    """List software with another version than the recorded one, with which tokens may differ."""
    before, now = origin.get("versions", {}), versions_of(engine.runner.runtime)
    return [f"{name} {before[name]}, now {now.get(name)}" for name in before if before[name] != now.get(name)]


def _heads(pattern: HeadPattern | None) -> dict[str, Any] | None:
    if pattern is None:
        return None
    return {"sink": pattern.sink, "recent": pattern.recent, "retrieval": pattern.mask.astype(int).tolist()}


def _plan(plan: KVPlan | str | Path | None) -> dict[str, Any] | None:
    """Return the plan, and not the file, which may have changed when steps are replayed."""
    if plan is None:
        return None
    return (plan if isinstance(plan, KVPlan) else KVPlan.load(plan)).as_dict()


def _text(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:56]} ..."

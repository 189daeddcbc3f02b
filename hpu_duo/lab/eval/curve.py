"""Accuracy against KV budget: the choice and number of retrieval heads, and the windows of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpu_duo.heads import HeadPattern
from hpu_duo.lab.eval.interval import interval_fields
from hpu_duo.lab.eval.kv_bytes import KVBytes
from hpu_duo.lab.eval.model_under_test import Subject
from hpu_duo.lab.eval.passkey import PasskeyResult, PasskeyTask, passkey_accuracy
from hpu_duo.lab.eval.result_file import ResultFile

FULL = "full attention"
STREAMING = "all streaming"
RANDOM = "random heads"


@dataclass(frozen=True)
class CurvePoint:
    """One binarised pattern to measure.

    Attributes:
        label: the curve it belongs to; several points of one label and share are several seeds.
        seed: number of its seed.
        sweep: the quantity that varies along its curve: "share", "sink" or "recent".
        pattern: binarised.
    """

    label: str
    seed: int
    sweep: str
    pattern: HeadPattern

    @property
    def key(self) -> dict[str, Any]:
        """Fields that identify the point in a file of results."""
        return {
            "label": self.label,
            "seed": self.seed,
            "sweep": self.sweep,
            "retrieval_heads": int(self.pattern.mask.sum()),
            "num_heads": self.pattern.mask.size,
            "sink": self.pattern.sink,
            "recent": self.pattern.recent,
            "mask": "".join("1" if kept else "0" for kept in self.pattern.mask.flat),
        }


@dataclass(frozen=True)
class CurveTask:
    """Patterns, shares and windows to measure.

    Attributes:
        patterns: pairs of label and scores; patterns of equal label are seeds of one method, in order.
        shares: shares of retrieval heads in (0, 1).
        num_random: random choices of heads per share.
        sinks, recents: windows to sweep, each with the other one as the first pattern has it.
        sweep_share: share of retrieval heads of these sweeps, cut from the first pattern.
    """

    patterns: tuple[tuple[str, HeadPattern], ...]
    shares: tuple[float, ...] = (0.125, 0.25, 0.375, 0.5, 0.75)
    num_random: int = 3
    sinks: tuple[int, ...] = ()
    recents: tuple[int, ...] = ()
    sweep_share: float = 0.5

    def __post_init__(self) -> None:
        if not self.patterns:
            raise ValueError("expected at least one head pattern, got none")
        first = self.patterns[0][1]
        for _, pattern in self.patterns:
            pattern.check_shape(first.num_layers, first.num_kv_heads)
        for label, pattern in self.patterns:
            if (pattern.sink, pattern.recent) != (first.sink, first.recent):
                raise ValueError(
                    f"expected patterns of one window, {first.sink} + {first.recent} tokens, for a fair "
                    f"comparison, got {pattern.sink} + {pattern.recent} from {label!r}; set both"
                )
            if label in (FULL, STREAMING, RANDOM):
                raise ValueError(f"expected a label other than {label!r}, which is a curve of its own")
        for share in (*self.shares, self.sweep_share):
            if not 0.0 < share < 1.0:
                raise ValueError(f"expected shares of retrieval heads between 0 and 1, got {share}")
        if self.num_random < 0:
            raise ValueError(f"expected num_random of 0 or more, got {self.num_random}")

    def points(self) -> list[CurvePoint]:
        """Every point, full attention and all streaming first."""
        first = self.patterns[0][1]
        shape, window = (first.num_layers, first.num_kv_heads), {"sink": first.sink, "recent": first.recent}
        full = HeadPattern.all_retrieval(*shape, **window)
        points = [
            CurvePoint(FULL, 0, "share", full),
            CurvePoint(STREAMING, 0, "share", HeadPattern.all_streaming(*shape, **window)),
        ]
        randoms = [
            (RANDOM, HeadPattern.random(*shape, seed=seed, **window)) for seed in range(self.num_random)
        ]
        points += _numbered(self.patterns, self.shares)
        points += _numbered(randoms, self.shares)
        label, chosen = self.patterns[0][0], binarised(first, self.sweep_share)
        points += [CurvePoint(label, 0, "sink", replace(chosen, sink=sink)) for sink in self.sinks]
        points += [CurvePoint(label, 0, "recent", replace(chosen, recent=recent)) for recent in self.recents]
        return points


def binarised(pattern: HeadPattern, share: float) -> HeadPattern:
    """The pattern with this share of retrieval heads, ties broken the same way every time."""
    return replace(pattern, retrieval=None).binarise(sparsity=1.0 - share)


def curve_points(
    points: Iterable[CurvePoint],
    task: PasskeyTask,
    load: Callable[[HeadPattern], Subject],
    results: ResultFile,
) -> Iterator[dict[str, Any]]:
    """Measure the points that ``results`` does not have yet; yields every record in order.

    Points with the same heads and windows, such as a low share of two methods that agree, are measured once,
    and have equal records.

    Args:
        load: loads the model with a binarised pattern.

    Raises:
        ValueError: the task does not fit the model, or a pattern is of another one.
    """
    for point in points:
        found = results.find(**point.key)
        if found is None:
            window = {name: point.key[name] for name in ("mask", "sink", "recent")}
            same = results.find(**window)
            measured = (
                passkey_accuracy(load(point.pattern), task) if same is None else PasskeyResult.of_record(same)
            )
            results.append({**point.key, **measured.record_fields})
            found = results.records[-1]
        yield found


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per curve and budget: mean, least and greatest accuracy over the seeds.

    Seeds answer the same questions, so the interval of the mean is computed for one seed's number of answers.
    The least and the greatest show how much seeds differ.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        names = ("label", "sweep", "retrieval_heads", "num_heads", "sink", "recent")
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    rows = []
    for (label, sweep, kept, heads, sink, recent), group in groups.items():
        found = [PasskeyResult.of_record(record) for record in group]
        exact = [one.accuracy for one in found]
        num_questions = min(one.num_answers for one in found)
        rows.append(
            {
                "label": label,
                "sweep": sweep,
                "retrieval_share": kept / heads,
                "retrieval_heads": kept,
                "sink": sink,
                "recent": recent,
                "num_seeds": len(group),
                "num_questions": num_questions,
                "num_answers": sum(one.num_answers for one in found),
                **interval_fields("accuracy", float(np.mean(exact)), num_questions),
                "accuracy_min": min(exact),
                "accuracy_max": max(exact),
                **interval_fields(
                    "token_accuracy", float(np.mean([one.token_accuracy for one in found])), num_questions
                ),
                **KVBytes.total(one.kv for one in found).report_fields,
            }
        )
    return rows


def _numbered(patterns: Sequence[tuple[str, HeadPattern]], shares: Sequence[float]) -> list[CurvePoint]:
    seen: dict[str, int] = {}
    points = []
    for label, pattern in patterns:
        seed = seen[label] = seen.get(label, -1) + 1
        points += [CurvePoint(label, seed, "share", binarised(pattern, share)) for share in shares]
    return points

"""A control: the answers of full attention where a head pattern failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hpu_duo.lab.eval.passkey import PasskeyResult, PasskeyTask, passkey_accuracy
from hpu_duo.lab.eval.subject import Subject

FAILS_BELOW = 0.5
"""Share of exact answers. Below it the model itself may be unable to do the task, whatever its heads keep."""


def full_attention(
    measured: Mapping[int, PasskeyResult],
    tasks: Mapping[int, Sequence[PasskeyTask]],
    load: Callable[[], Subject] | None,
) -> dict[int, PasskeyResult]:
    """Answers of full attention at the lengths where fewer than half of the answers were exact.

    One document of each task is asked again, to tell a model that cannot do the task from a pattern that
    cannot.

    Args:
        measured: result by length in tokens.
        tasks: the tasks of each length.
        load: loads the same model with full attention, called if it is needed; None if that was measured.

    Raises:
        ValueError: the model cannot be loaded with full attention.
    """
    doubtful = {length: one for length, one in measured.items() if one.accuracy < FAILS_BELOW}
    if load is None or not doubtful:
        return doubtful
    subject = load()
    return {
        length: PasskeyResult.total(
            passkey_accuracy(subject, replace(task, num_documents=1)) for task in tasks[length]
        )
        for length in doubtful
    }

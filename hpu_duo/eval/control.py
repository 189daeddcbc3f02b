"""Whether full attention can do what a head pattern failed at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hpu_duo.eval.passkey import PasskeyResult, PasskeyTask, passkey_accuracy
from hpu_duo.eval.subject import Subject

FAILS_BELOW = 0.5
"""Share of exact answers. With fewer, a task says little about the heads that were left out."""


def full_attention(
    measured: Mapping[int, PasskeyResult],
    tasks: Mapping[int, Sequence[PasskeyTask]],
    load: Callable[[], Subject] | None,
) -> dict[int, PasskeyResult]:
    """What full attention answers at the lengths where fewer than half of the answers were exact.

    One document of each task is asked again, which tells a model that cannot do it from heads that cannot.

    Args:
        measured: the answers of each length, in tokens.
        tasks: the tasks of each length.
        load: the same model with full attention, called if there is a doubt; None if it was measured itself.

    Raises:
        ValueError: the model cannot be loaded so.
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

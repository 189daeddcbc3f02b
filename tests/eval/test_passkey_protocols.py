"""Passkey questions in other protocols: asked often before, or behind more decoded tokens."""

from collections.abc import Callable

import pytest

from hpu_duo.lab.eval import NeedleGrid, PasskeyQuestions, PasskeyTask, Subject, passkey_accuracy
from hpu_duo.lab.tasks.rehearsed import Rehearsals

Load = Callable[[float | None], Subject]


def test_rehearsed_passkeys_are_found_by_full_attention_and_lost_by_a_window(builtin: Load) -> None:
    task = PasskeyTask(500, 1, 2, 3, rehearsals=Rehearsals(2))
    full, streaming = (passkey_accuracy(builtin(one), task) for one in (None, 1.0))
    assert full.accuracy == 1.0
    # Sink and recent are 16 and 64 tokens; the tail without passkeys has 175.
    assert streaming.accuracy == 0.0
    assert passkey_accuracy(builtin(0.5), task).accuracy == 1.0


def test_depths_and_rehearsals_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="depths or rehearsals, got both"):
        PasskeyTask(500, depths=(0.5,), rehearsals=Rehearsals(2))
    with pytest.raises(ValueError, match="num_decoded of at least 1"):
        PasskeyTask(500, num_decoded=0)


def test_simulated_decodes_move_the_end_of_a_document_to_its_questions(builtin: Load) -> None:
    subject = builtin(0.5)
    ours = PasskeyQuestions.write(subject, PasskeyTask(300, 1, 2, 3))
    fifty = PasskeyQuestions.write(subject, PasskeyTask(300, 1, 2, 3, num_decoded=50))
    assert fifty.answer_lengths == ours.answer_lengths
    for before, after in ((ours, fifty),):
        (whole,), (shorter,) = before.prompts, after.prompts
        num_moved = len(whole) - len(shorter)
        assert shorter == whole[: len(shorter)]
        for one, other in zip(before.continuations[0], after.continuations[0], strict=True):
            assert other == (*whole[len(shorter) :], *one)
        asked = min(
            len(one) - size for one, size in zip(ours.continuations[0], ours.answer_lengths[0], strict=True)
        )
        # The last token of a prompt is decoded as well.
        assert num_moved + asked + 1 == 50


def test_answers_of_full_attention_do_not_depend_on_what_is_decoded(builtin: Load) -> None:
    subject = builtin(None)
    ours, fifty = (passkey_accuracy(subject, PasskeyTask(300, 1, 3, 4, num_decoded=num)) for num in (1, 50))
    assert (ours.num_exact, ours.num_right) == (fifty.num_exact, fifty.num_right)
    assert ours.logprob == pytest.approx(fifty.logprob, abs=0.05)
    assert ours.kv == fifty.kv


def test_a_grid_hands_its_protocol_to_its_cells() -> None:
    assert NeedleGrid((300,), (0.5,), num_decoded=50).cell(300, 0.5).num_decoded == 50

"""ShareGPT: conversations of users with ChatGPT, which give prompts and lengths but no times.

A JSON list of objects with ``conversations``, a list of turns with ``from`` and ``value``. The first turn is
the prompt, and the second one's length that of the output.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from hpu_duo.lab.traces.arrival import Arrival

MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048
"""Bounds on the conversations, as in benchmarks since vLLM's first one."""


def read_sharegpt(
    path: Path,
    count_tokens: Callable[[str], int],
    *,
    min_tokens: int = MIN_TOKENS,
    max_prompt: int = MAX_PROMPT,
    max_total: int = MAX_TOTAL,
) -> Iterator[Arrival | None]:
    """Yield the first exchange of every conversation, all at time 0; None for those left out.

    Args:
        count_tokens: counts the tokens of a text for the model to measure.
        min_tokens: of a prompt and of an output. Shorter ones are left out, as conversations of one turn are.
        max_prompt, max_total: tokens of a prompt, and of prompt and output together, at most.

    Raises:
        ValueError: the file is not of this format.
    """
    try:
        conversations = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"expected a JSON list of conversations in {path}: {error}") from None
    if not isinstance(conversations, list):
        raise ValueError(
            f"expected a JSON list of conversations in {path}, got {type(conversations).__name__}"
        )
    for number, conversation in enumerate(conversations):
        prompt, answer = _first_turns(conversation, f"conversation {number} of {path}")
        if not prompt or not answer:
            yield None
            continue
        num_prompt, num_output = count_tokens(prompt), count_tokens(answer)
        is_long = num_prompt > max_prompt or num_prompt + num_output > max_total
        if min(num_prompt, num_output) < min_tokens or is_long:
            yield None
        else:
            yield Arrival(0.0, num_prompt, num_output, text=prompt)


def _first_turns(conversation: object, where: str) -> tuple[str, str]:
    """The texts of the first two turns; empty where there are fewer."""
    turns = None
    if isinstance(conversation, dict):
        turns = conversation.get("conversations", conversation.get("conversation"))
    if not isinstance(turns, list):
        raise ValueError(
            f"expected an object with 'conversations' in {where}, got {str(conversation)[:40]!r}"
        )
    if len(turns) < 2:
        return "", ""
    prompt, answer = (turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2])
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise ValueError(f"expected texts in 'value' of {where}, got {str(turns[:2])[:60]!r}")
    return prompt, answer

"""A short generation on the device, which has to give the tokens of the CPU."""

from __future__ import annotations

from hpu_duo.lab.selftest.finding import Notes
from hpu_duo.lab.selftest.subject import Subject, run_prompts


def compare_generation(subject: Subject, notes: Notes) -> None:
    """Generate greedily from prompts that are served together, as users do, with the device's own defaults.

    In float32 the tokens have to be equal. In bfloat16 a token may change where two candidates are nearly as
    likely, so only how far both agree is reported.
    """
    for dtype in ("float32", "bfloat16"):
        notes.begin(f"generation in {dtype}")
        there = subject.load(dtype=dtype, graphs="auto")
        here = subject.load("cpu", attention="reference", dtype=dtype, graphs="eager")
        prompts = subject.prompts(there.config.get_text_config().vocab_size)
        got, expected = run_prompts(there, prompts), run_prompts(here, prompts)
        same = [_num_equal(*pair) for pair in zip(got, expected)]
        total, equal = sum(map(len, expected)), sum(same)
        detail = f"{equal} of {total} tokens of {len(prompts)} prompts before the first difference to the CPU"
        values = {"equal": equal, "total": total}
        if dtype == "float32":
            notes.check(dtype, equal == total, detail, **values)
        else:
            notes.fact(dtype, detail, **values)


def _num_equal(got: tuple[int, ...], expected: tuple[int, ...]) -> int:
    """Tokens up to the first that differs."""
    pairs = list(zip(got, expected))
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))

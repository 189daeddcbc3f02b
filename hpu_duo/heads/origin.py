"""Check that a head pattern was made for a model: most published patterns have the same shape."""

from __future__ import annotations

from hpu_duo.heads.pattern import HeadPattern

NAME_KEY = "model_name"
FINGERPRINT_KEY = "model_fingerprint"
"""Keys of a pattern's config.json; ``hpu-duo identify`` writes both."""


def check_origin(pattern: HeadPattern, model_name: str, fingerprint: str | None) -> str | None:
    """Compare the model that a pattern was made for with the one that it is used with.

    Args:
        model_name: for the message.
        fingerprint: of the model's files; None without weights.

    Returns:
        A note for the user when nothing could be compared, else None.

    Raises:
        ValueError: the pattern was made for another model.
    """
    made_for = pattern.config.get(NAME_KEY)
    own = pattern.config.get(FINGERPRINT_KEY)
    if own is None:
        told = "" if made_for is None else f" but a name, {made_for!r}"
        return (
            f"the head pattern {pattern.source!r} has no {FINGERPRINT_KEY}{told}: only its shape "
            f"shows that it is for {model_name!r}"
        )
    if fingerprint is None:
        return (
            f"the head pattern {pattern.source!r} was made for {made_for!r}; whether {model_name!r} is that "
            "model cannot be told without its weights"
        )
    if own != fingerprint:
        raise ValueError(
            f"expected a head pattern made for {model_name!r} ({FINGERPRINT_KEY} {fingerprint[:12]}), got "
            f"{pattern.source!r}, made for {made_for!r} ({str(own)[:12]}); to use it all the same, take "
            f"{FINGERPRINT_KEY} out of its config.json"
        )
    return None

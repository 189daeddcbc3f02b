"""Rules of sparse attention as users write them: ``sink_band:sink=4,band=1024|strided:stride=128``."""

from __future__ import annotations

from collections.abc import Callable

from bias_builders import Dilated, Fixed, Rule, RuleIntersection, RuleUnion, Strided, Window
from hpu_duo.named import call_with_options


def band(width: int = 1024) -> Rule:
    """The last ``width`` tokens."""
    return Window(0, width).validate()


def sink_band(sink: int = 4, band: int = 1024) -> Rule:
    """The first ``sink`` tokens and the last ``band`` ones."""
    return Window(sink, band).validate()


def dilated(width: int = 512, dilation: int = 2) -> Rule:
    """Every ``dilation``-th of the last tokens, ``width`` of them."""
    return Dilated(width, dilation)


def strided(stride: int = 128) -> Rule:
    """The last ``stride`` tokens, and every ``stride``-th before them."""
    return Strided(stride)


def fixed(stride: int = 128, summary: int = 16) -> Rule:
    """The token's own run of ``stride`` positions, and the last ``summary`` positions of every run."""
    return Fixed(stride, summary)


ATTENTION_RULES: dict[str, Callable[..., Rule]] = {
    "band": band,
    "dilated": dilated,
    "fixed": fixed,
    "sink_band": sink_band,
    "strided": strided,
}
"""Rules by name."""


def make_attention_rule(text: str) -> Rule:
    """Make the rule that a text describes.

    Args:
        text: a name with options behind it; several are joined by ``|``, what any of them sees, and, more
            tightly, by ``&``, what all of them see.

    Raises:
        ValueError: there is no rule of a name, or it has no such option or not with this value.
    """
    terms = [
        _joined(
            RuleIntersection, [call_with_options("attention_rule", each, ATTENTION_RULES) for each in term]
        )
        for term in (part.split("&") for part in text.replace(" ", "").split("|"))
    ]
    return _joined(RuleUnion, terms)


def _joined(join: Callable[[tuple[Rule, ...]], Rule], rules: list[Rule]) -> Rule:
    return rules[0] if len(rules) == 1 else join(tuple(rules))

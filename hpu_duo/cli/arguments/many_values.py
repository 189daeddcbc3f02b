"""Options that take several values after one name: ``--context 8192 32768``."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class ManyValues(TyperCommand):
    """A command whose repeatable options also take their values in a row.

    ``--context 8192 32768`` becomes ``--context 8192 --context 32768``. For commands without positional
    arguments, where a word that belongs to no option could only be a mistake.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Spread the rows of values, then parse as usual."""
        normalize = ctx.token_normalize_func or str
        names = {
            name
            for parameter in self.get_params(ctx)
            if getattr(parameter, "multiple", False)
            for name in parameter.opts
        }
        spread: list[str] = []
        current: str | None = None
        has_value = False
        for word in args:
            if word.startswith("-"):
                name = "--" + normalize(word.partition("=")[0].removeprefix("--"))
                current = word.partition("=")[0] if name in names else None
                has_value = "=" in word
            elif current is not None:
                if has_value:
                    spread.append(current)
                has_value = True
            spread.append(word)
        return super().parse_args(ctx, spread)

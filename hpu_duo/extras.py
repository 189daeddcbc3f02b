"""Install commands for extras. The package is not on PyPI, so they never name it.

``python -m hpu_duo.extras serve`` prints the command, for scripts.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

_NAME = "hpu-duo"


def install_command(extra: str, above: Path = Path(__file__).parent.parent) -> str:
    """The command that installs an extra: from this checkout, or by names of packages for a wheel.

    Args:
        extra: of ``pyproject.toml``, for example ``serve``.
        above: the folder of this package; a checkout has ``pyproject.toml`` there.
    """
    from importlib.metadata import PackageNotFoundError

    if (above / "pyproject.toml").is_file():
        return f"pip install -e {_quoted(f'{above}[{extra}]')}"
    try:
        return " ".join(["pip install", *(_quoted(one) for one in _packages(extra))])
    except PackageNotFoundError:  # files that were copied without their metadata
        return f"pip install -e '.[{extra}]' in a checkout of {_NAME}"


def _packages(extra: str) -> Iterator[str]:
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    for line in requires(_NAME) or ():
        needed = Requirement(line)
        marker = needed.marker
        if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
            continue
        if needed.name == _NAME:  # an extra that includes others
            for other in sorted(needed.extras):
                yield from _packages(other)
        else:
            name = f"{needed.name}[{','.join(sorted(needed.extras))}]" if needed.extras else needed.name
            yield f"{name}{needed.specifier}"


def _quoted(text: str) -> str:
    return shlex.quote(text) if shlex.quote(text) != text else f"'{text}'"


if __name__ == "__main__":
    print(install_command(sys.argv[1]))

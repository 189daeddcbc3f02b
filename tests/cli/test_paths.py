"""An empty path is refused by every command, and is not the current directory."""

from collections.abc import Callable

import pytest
from typer.testing import Result


@pytest.mark.parametrize(
    "command",
    [
        "generate --prompt a --model",
        "generate --prompt a --pattern",
        "passkey --model",
        "identify --output",
        "identify --output x --model",
        "plan --num-blocks 4 --model",
        "plan --num-blocks 4 --model x --from-shapes",
        "capacity --model",
        "audit --model",
        "warmup --manifest",
        "pattern show",
        "eval ruler --out",
        "eval niah --out",
        "eval longbench --file",
    ],
)
def test_an_empty_path_is_refused(hpu_duo: Callable[..., Result], command: str) -> None:
    result = hpu_duo(*command.split(), "")
    assert result.exit_code == 2
    assert "expected a path, got ''" in result.stderr

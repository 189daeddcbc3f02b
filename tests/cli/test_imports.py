"""Commands that read no weights import what they need and no more: torch and transformers take seconds."""

import subprocess
import sys

import pytest

from hpu_duo.builtin import MODEL_DIR
from tests.tiers import further

SCRIPT = """
import sys
from hpu_duo.cli import main
sys.argv = ["hpu-duo", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print(*{"torch", "transformers"} & set(sys.modules))
"""

LIMITS = ("--max-num-seqs=2", "--max-num-batched-tokens=64", "--max-model-len=256")


@pytest.mark.parametrize(
    ("command", "imported"),
    [
        # test_a_plan_imports_neither_torch_nor_transformers is faster.
        *further((("plan", *LIMITS, "--num-blocks=8", "--graphs-budget=4"), "")),
        # The kinds of heads, by which bytes and work are counted, are classes with code for torch.
        (("capacity", "--context=512"), "torch"),
        (("simulate", "--num-requests=2", "--workload=poisson:outputs=2"), "torch"),
    ],
    ids=lambda value: value[0] if value else None,
)
def test_a_command_imports_neither_torch_nor_transformers_unless_it_needs_them(
    command: tuple[str, ...], imported: str
) -> None:
    line = [sys.executable, "-c", SCRIPT, command[0], "--model", str(MODEL_DIR), *command[1:]]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == imported

"""The linters of the development extra, found beside this interpreter or on the path."""

import os
import shutil
import subprocess
import sys
from pathlib import Path


def run_tool(name: str, *arguments: str | Path) -> None:
    """Run a linter; what it complains of is the test's message.

    Raises:
        AssertionError: it is not installed, or found something.
    """
    own = str(Path(sys.executable).parent)
    found = shutil.which(name, path=os.pathsep.join((own, os.environ["PATH"])))
    assert found is not None, f"expected {name}, which the extra dev installs, beside {sys.executable}"
    done = subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr

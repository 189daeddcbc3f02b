"""Process of kvpress's own Python: started, asked line by line, ended."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

_WORKER = Path(__file__).parent / "worker.py"
_LAST_LINES = 12
_END_S = 30.0


class KVPressError(Exception):
    """A Python without kvpress, or one that cannot load the model, or that has ended while it worked."""


class KVPressProcess:
    """A process that runs kvpress on a model; see ``worker.py`` for what it is asked.

    Args:
        python: program of an environment that has kvpress.
        model: directory of the model.
        dtype: of its weights, by transformers' name, or "auto".
        device: "cuda", "auto" for a GPU where there is one, or another name for the CPU.

    Attributes:
        versions: of kvpress, torch and transformers there; and its ``device``.

    Raises:
        KVPressError: the program does not start, lacks kvpress, or cannot load the model.
    """

    def __init__(self, python: Path, model: Path, dtype: str = "auto", device: str = "cpu") -> None:
        self._python = python
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                [python, _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            self._errors.close()
            raise KVPressError(
                f"expected a Python that has kvpress, got {python}: {error.strerror}"
            ) from error
        try:
            self.versions = self._begin(
                {
                    "model": str(model),
                    "dtype": dtype,
                    "device": device,
                    "num_threads": torch.get_num_threads(),
                }
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> KVPressProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Have one piece of work done.

        Raises:
            KVPressError: the process has ended instead; its last words are in the message.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise KVPressError(self._last_words())
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _begin(self, setting: dict[str, Any]) -> dict[str, str]:
        found = self.ask(setting)
        if "missing" in found:
            raise KVPressError(
                f"expected a Python that has kvpress ({self._python} -m pip install kvpress), got "
                f"{self._python}: {found['missing']}"
            )
        versions: dict[str, str] = found["versions"]
        if "unreadable" in found:
            raise KVPressError(
                f"expected a model that kvpress's Python can load, which has transformers "
                f"{versions['transformers']}, got {setting['model']}: {found['unreadable']}"
            )
        return versions

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        text = self._errors.read().decode("utf-8", errors="replace")
        last = "\n".join(text.rstrip().splitlines()[-_LAST_LINES:]) or "(it said nothing)"
        return f"kvpress's process ({self._python}) ended with exit code {code}; its last lines:\n{last}"

"""Engines that are compared, each in a process and an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).parent / "engine_workers"
BASELINE, OURS, STREAMING = "transformers", "hpu-duo", "hpu-duo, half of the heads streaming"
SCRIPTS = {
    BASELINE: "transformers_generate.py",
    OURS: "hpu_duo_replayed.py",
    STREAMING: "hpu_duo_replayed.py",
    "vllm": "vllm_cpu.py",
    "openvino": "openvino_genai_paged.py",
    "llama.cpp": "llama_cpp_f16.py",
}
HAS_DTYPES = (BASELINE, OURS, "vllm")
"""Engines with a column for each dtype of ``--dtypes``."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")
"""Variables that name the folders in which engines keep what they compile."""


def in_dtype(engine: str, dtype: str) -> str:
    """Name of the column of an engine in a dtype of its own."""
    return f"{engine}, {dtype}"


class Worker:
    """An engine in its own process.

    Args:
        dtype: to compute in; auto = what the engine chooses.

    Attributes:
        engine: its name and version.
        start_s: seconds of the clock from the start of the process until it can serve.

    Raises:
        ValueError: the worker ended instead of answering.
    """

    def __init__(
        self, name: str, python: Path, model: Path, options: dict[str, int], cache: Path, dtype: str = "auto"
    ) -> None:
        own = cache / f"compiled-{name.split(',')[0]}"
        model = EXPORTS[name](python, model, cache) if name in EXPORTS else model
        given = {
            **options,
            "--dtype": dtype,
            "--cache": cache,
            "--streaming": 0.5 if name == STREAMING else 0.0,
        }
        self._log = (cache / f"{name}.log").open("a")
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [python, WORKERS / SCRIPTS[name], model, *(str(x) for pair in given.items() for x in pair)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            env={**os.environ, "OMP_NUM_THREADS": "1", **{key: str(own / key) for key in CACHES}},
        )
        self.engine = str(self._read()["engine"])
        self.start_s = time.perf_counter() - began

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """One run; see ``engine_workers/protocol.py``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(f"the worker {self._process.args} ended early; see {self._log.name}")
        return json.loads(line)


def exported(python: Path, model: Path, cache: Path) -> Path:
    """The checkpoint in OpenVINO's format, written at the first call."""
    target = cache / f"openvino-{model.name}"
    if not (target / "openvino_detokenizer.xml").is_file():
        subprocess.run([python, WORKERS / "openvino_export.py", model, target], check=True)
    return target


def in_gguf(python: Path, model: Path, cache: Path) -> Path:
    """The checkpoint as a GGUF file in float16, written at the first call."""
    target = cache / f"{model.name}-f16.gguf"
    if not target.is_file():
        subprocess.run([python, WORKERS / "llama_cpp_export.py", model, target], check=True)
    return target


EXPORTS = {"openvino": exported, "llama.cpp": in_gguf}

"""Try the fused operators of a Gaudi at the head sizes of known models, and note what each one does."""

from __future__ import annotations

import torch

from hpu_duo.device import resolve_device
from hpu_duo.lab.selftest.finding import Notes
from hpu_duo.lab.selftest.subject import Subject
from hpu_duo.startup.blueprint import line_bytes
from kernels_ref import Softmax
from kernels_ref.hpu.trial import try_operators

_HEADS = {"Llama 3": (4, 128), "Llama 2": (1, 128), "Qwen 2.5": (7, 128), "Llama 3.2 1B": (4, 64)}
"""Query heads of a key/value head, and head size."""


def try_fused(subject: Subject, notes: Notes) -> bool:
    """Note which operators pass their trial; those that do not are left out when a model is loaded.

    Returns:
        Whether any operator passes for all of them.
    """
    device, always = resolve_device(subject.device), True
    for model, (group_size, head_dim) in _HEADS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for softmax in Softmax:
                name = f"{model}, {str(dtype).removeprefix('torch.')}, {softmax.value} softmax"
                notes.begin(f"fused operators for heads of {name}")
                trial = try_operators(device, dtype, group_size, head_dim, softmax, line_bytes(device))
                operators = trial.operators
                passed = ", ".join(operators.names) or "none"
                failed = f"; {'; '.join(trial.problems)}" if trial.problems else ""
                notes.fact(f"fused operators, {name}", f"passed: {passed}{failed}", **operators._asdict())
                always = always and bool(operators.names)
    return always

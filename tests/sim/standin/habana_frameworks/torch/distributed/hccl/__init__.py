"""Stand-in of ``habana_frameworks.torch.distributed.hccl``: what its import does, over gloo.

From the bridge's public source: the import reads what launchers set, chooses the process's module unless one
is chosen already, and makes the backend known for devices ``hpu``. There is no tensor of such a device, so
in a process that was started for the purpose the simulated ones take their place.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from habana_frameworks.torch.utils.internal import is_lazy
from hpu_duo.lab.sim import installation

IS_LAZY = is_lazy()
FAULT = "STANDIN_HCCL_FAULT"
"""Tests: what is wrong with the cards' network."""


def _choose_module() -> None:
    rank, size = int(os.environ.get("LOCAL_RANK", -1)), int(os.environ.get("WORLD_SIZE", 1))
    if "HLS_MODULE_ID" not in os.environ and rank != -1 and size != 1:
        visible = os.environ.get("HABANA_VISIBLE_MODULES")
        os.environ["HLS_MODULE_ID"] = visible.split(",")[rank] if visible else str(rank)


def _make_group(options: Any, _: Any) -> Any:
    if FAULT in os.environ:
        raise RuntimeError(os.environ[FAULT])
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)


_choose_module()
if not hasattr(dist.Backend, "HCCL"):
    # Data of simulated tensors lie on the CPU, which is where their exchange arrives.
    dist.Backend.register_backend("hccl", _make_group, extended_api=True, devices=["hpu", "cpu"])
if "RANK" in os.environ:
    installation.problem = lambda: None
    installation.install()

"""One operator call on the simulated device, taken apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpu_duo.lab.rules import Operator
from hpu_duo.lab.sim.tensor import HPU, SimTensor

_CPU = torch.device("cpu")


class Call:
    """One operator call: its host arguments and its operands.

    Args:
        operator: the operator that is called.
        args, kwargs: as torch gives them.

    Attributes:
        host_args, host_kwargs: with host data in place of device tensors, and the CPU in place of the device.
        sims: operands on the device.
        strays: operands in host memory that are more than scalars.
        signature: key of the call's recipe.
    """

    def __init__(self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.operator, self.args, self.kwargs = operator, args, kwargs
        self.sims: list[SimTensor] = []
        self.strays: list[torch.Tensor] = []
        self.signature: list[Any] = []
        self.host_args = [self._unwrap(arg) for arg in args]
        self.host_kwargs = {name: self._unwrap(value) for name, value in kwargs.items()}
        self.host_kwargs.pop("pin_memory", None)

    @property
    def written(self) -> list[Any]:
        """Arguments that the operator changes."""
        operator = self.operator
        return [*(self.args[i] for i in operator.written), *(self.kwargs[n] for n in operator.written_names)]

    @property
    def leaves_device(self) -> bool:
        """Whether the result is to be elsewhere, by the keyword arguments."""
        return leaves_device(self.kwargs)

    def _unwrap(self, value: Any) -> Any:
        if type(value) is SimTensor:
            self.sims.append(value)
            self.signature.append(value.signature)
            return value.host
        if isinstance(value, torch.Tensor):
            if value.dim():
                self.strays.append(value)
                self.signature.append((tuple(value.shape), value.dtype))
            else:
                self.signature.append((value.item(), value.dtype))
            return value
        if isinstance(value, list | tuple):
            return type(value)(map(self._unwrap, value))
        if isinstance(value, torch.device):
            return _CPU
        if isinstance(value, torch.ScriptObject):
            # A process group, say, is another object in each call, and may not live as long as the counts.
            self.signature.append(type(value))
            return value
        # 1, 1.0 and True are equal, and different recipes.
        self.signature.append((type(value), value))
        return value


def leaves_device(kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator is to leave the device, by its keyword arguments."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != HPU.type

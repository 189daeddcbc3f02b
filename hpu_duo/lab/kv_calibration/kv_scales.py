"""Scales of keys and values for fp8, by their largest magnitudes on prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hpu_duo.device import resolve_device
from hpu_duo.lab.identify import GatedModel, Progress
from hpu_duo.lab.identify.gated_model import attend_as_model
from hpu_duo.lab.kv_calibration.calibration import CalibrationRequest, origin_of, prompts_of
from hpu_duo.modeling.attention import AttentionCall, Trial

LARGEST = 448.0
"""The largest fp8 number."""
HEADROOM = 2.0
"""Keys and values may be so many times as large as on the prompts; numbers of fp8 are as exact for it."""


class ScaleCalibration:
    """One measurement, checked and ready to go.

    Attributes:
        lengths: tokens of each prompt.
        largest: magnitudes of keys and of values of each layer that attends, ``[layers, 2]``, once ``run``
            has ended.

    Raises:
        ValueError: the model cannot be read, or prompts do not fit it.
    """

    def __init__(self, request: CalibrationRequest) -> None:
        _, self._prompts = prompts_of(request, shortest=1)
        self.lengths = tuple(len(prompt.ids) for prompt in self._prompts)
        self._request = request
        self._model = GatedModel.load(request.model, request.dtype, resolve_device(request.device))
        self._numbers = [layer.number for layer in self._model.layers]
        self.largest = torch.zeros(len(self._numbers), 2)

    @property
    def total(self) -> int:
        """Prompts."""
        return len(self._prompts)

    def run(self) -> Iterator[Progress]:
        """Run the model over prompt after prompt, and yield the progress after each."""
        numbers = {id(layer.attention): number for number, layer in enumerate(self._model.layers)}
        for done, prompt in enumerate(self._prompts, start=1):
            with torch.no_grad():
                ranges = _Ranges(self._model.calls, numbers, self.largest)
                self._model.hidden(torch.from_numpy(prompt.ids), ranges)
            yield Progress(done, self.total)

    def save(self, directory: Path) -> None:
        """Write ``kv_scales.safetensors``, with the names that checkpoints have, and ``kv_scales.json``.

        Raises:
            ValueError: keys or values of the model are not finite.
            OSError: files cannot be written.
        """
        if (wrong := (~self.largest.isfinite()).any(dim=1).nonzero()).numel():
            number = int(wrong[0])
            raise ValueError(
                f"expected finite keys and values in layer {self._numbers[number]} of {self._request.model}, "
                f"got at most {self.largest[number].tolist()}"
            )
        scales = torch.where(self.largest > 0, self.largest * (HEADROOM / LARGEST), torch.ones(()))
        tensors: dict[str, Tensor] = {}
        layers = []
        for number, of_layer, largest in zip(self._numbers, scales, self.largest.tolist(), strict=True):
            name = f"model.layers.{number}.self_attn"
            tensors |= {
                f"{name}.{letter}_scale": of_layer[place].clone() for place, letter in enumerate("kv")
            }
            k_scale, v_scale = of_layer.tolist()
            layers.append({"k_max": largest[0], "v_max": largest[1], "k_scale": k_scale, "v_scale": v_scale})
        fields = {
            "origin": ["hpu-duo calibrate", *origin_of(self._request, self.lengths)],
            "largest_fp8": LARGEST,
            "headroom": HEADROOM,
            "layers": layers,
        }
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / "kv_scales.safetensors", {"format": "pt"})
        (directory / "kv_scales.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


class _Ranges(Trial):
    """The model's own attention, and the largest keys and values on the way."""

    def __init__(
        self, calls: Mapping[int, AttentionCall], numbers: Mapping[int, int], largest: Tensor
    ) -> None:
        self._calls, self._numbers, self._largest = calls, numbers, largest

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        row = self._largest[self._numbers[id(module)]]
        row.copy_(torch.maximum(row, torch.stack([x.abs().amax().float().cpu() for x in (k, v)])))
        return attend_as_model(self._calls[id(module)], q, k, v, sinks).transpose(1, 2).contiguous()

"""Implementations of the parts, as tests take them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from hpu_duo.lab.sim import fused
from kernels_ref import Implementation, Softmax, unified_attention
from kernels_ref.chunks import DEFAULT_BOUNDS, DEFAULT_SLICES, ChunkBounds, Slices
from kernels_ref.hpu.attention import NO_OPERATORS, FusedOperators
from tests.kernels_ref.scenario import World


@dataclass(frozen=True)
class Choice:
    """An implementation, and the fused operators of a kind of simulated device."""

    impl: Implementation
    operators: FusedOperators = NO_OPERATORS
    device: str = "GAUDI3"

    def attend(
        self,
        world: World,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        softmax: Softmax = Softmax.EXACT,
        slices: Slices = DEFAULT_SLICES,
        chunks: ChunkBounds = DEFAULT_BOUNDS,
    ) -> torch.Tensor:
        """Outputs of a step of one layer."""
        fused.register()
        q, k, v, step = world.inputs(self.impl.reads_masks)
        sizes = {"slices": slices, "chunks": chunks}
        spec = replace(world.spec(self.impl, softcap, softmax), operators=self.operators, **sizes)
        with fused.named(self.device):
            return unified_attention(q, k, v, world.cache, step, spec, sinks)

    def fast(self) -> Choice:
        """The same for fast softmax."""
        return replace(self, operators=self.operators._replace(inverse_scale=fused.FAST_INVERSE))


REFERENCE = Choice(Implementation.REFERENCE)
GAUDI2 = Choice(Implementation.HPU, FusedOperators(True, True, True, row_attention=True), "GAUDI2")
GAUDI3 = Choice(Implementation.HPU, GAUDI2.operators._replace(line_bytes=fused.LINE_BYTES))
CHOICES = {
    "reference": REFERENCE,
    "sdpa": Choice(Implementation.SDPA),
    "hpu-gaudi2": GAUDI2,
    "hpu-gaudi3": GAUDI3,
}
"""Triton's interpreter is slow, so its kernels have smaller tests of their own."""

PORTABLE = {name: choice for name, choice in CHOICES.items() if name != "sdpa"}
"""Those that run on an HPU."""

ALL = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
ON_HPU = pytest.mark.parametrize("choice", PORTABLE.values(), ids=PORTABLE)

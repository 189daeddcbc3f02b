"""A frozen transformers model whose attention is mixed by gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hpu_duo.lab.identify.attention import Band
from hpu_duo.lab.identify.gates import FullFrom, GatedAttention, TeacherAttention
from hpu_duo.modeling.attention import Trial, attending, placeholder_mask
from hpu_duo.modeling.loading import load_model, read_config, resolve_dtype
from hpu_duo.modeling.probe import DecoderLayer, probe

_LOGITS_AT_ONCE = 32


@dataclass(frozen=True)
class Teaching:
    """Outputs of the unchanged model for one text.

    Attributes:
        hidden: ``[N, hidden]``, last hidden states at the wanted positions.
        attention: its attention outputs ``[1, T, H, D]`` by identity of the attention module.
    """

    hidden: Tensor
    attention: dict[int, Tensor]


class GatedModel:
    """Runs one text at a time, as it is or with gates.

    Attributes:
        layers: the decoder layers, each with its recorded attention call.
        calls: the attention calls by identity of the attention module.
        num_layers, num_kv_heads: shape of the gates.

    Raises:
        ValueError: the model cannot be served, or its layers differ in KV heads.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[DecoderLayer]) -> None:
        kv_heads = sorted({layer.call.num_kv_heads for layer in layers})
        if len(kv_heads) != 1:
            raise ValueError(
                f"head patterns and KV plans need equally many key/value heads in every layer, got {kv_heads}"
            )
        self.model = model
        self.layers = tuple(layers)
        self.num_layers, self.num_kv_heads = len(self.layers), kv_heads[0]
        self.device = next(model.parameters()).device
        self.calls = {id(layer.attention): layer.call for layer in layers}
        self._mask = placeholder_mask(self.device)

    @classmethod
    def load(cls, path: str | Path, dtype: str | torch.dtype, device: torch.device) -> GatedModel:
        """Read a checkpoint; ValueError when it cannot be read or served."""
        config = read_config(path)
        model = load_model(path, config, resolve_dtype(dtype, config), device)
        layers = probe(model)
        if hasattr(model, "set_experts_implementation"):
            # What the engine takes runs every expert for every token: static shapes are not needed here.
            model.set_experts_implementation("eager")
        return cls(model, layers)

    def gated_layers(self, num_tokens: int) -> tuple[bool, ...]:
        """Say for each layer whether it has gates: it has no window, or one of ``num_tokens`` tokens.

        In the other layers all heads stream, whatever a pattern says of them.
        """
        windows = [layer.call.sliding_window for layer in self.layers]
        return tuple(window is None or window >= num_tokens for window in windows)

    @torch.no_grad()
    def teach(self, ids: Tensor, positions: Tensor, gated: Sequence[bool], full_from: FullFrom) -> Teaching:
        """Run the unchanged model over a text.

        Args:
            ids: int64 ``[T]``.
            positions: int64 ``[N]``, where the hidden state is wanted.
            gated: for each layer, whether it has gates.
            full_from: attention outputs are kept only if gates mix in the teacher's.
        """
        kept = frozenset(id(layer.attention) for layer, has_gates in zip(self.layers, gated) if has_gates)
        trial = TeacherAttention(self.calls, kept if full_from is FullFrom.TEACHER else frozenset())
        return Teaching(self.hidden(ids, trial)[positions], trial.outputs)

    def gated_hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        gates: Tensor,
        gated: Sequence[bool],
        band: Band,
        attention: dict[int, Tensor] | None,
    ) -> Tensor:
        """Last hidden states ``[N, hidden]`` with gates ``[L, K]``; see ``GatedAttention`` for the rest.

        Each layer keeps its input only, and is run again in the backward pass.
        """
        by_module = {id(layer.attention): gates[i] for i, layer in enumerate(self.layers) if gated[i]}
        trial = GatedAttention(self.calls, by_module, band, attention)
        with self._checkpointed(trial):
            return self.hidden(ids, trial)[positions]

    def hidden(self, ids: Tensor, trial: Trial) -> Tensor:
        """Last hidden states ``[T, hidden]`` of a text ``[T]``, attended by ``trial``."""
        tokens = ids.to(self.device)[None]
        # Some models of transformers 4 name a part as their base that they do not have, and get themselves.
        is_own_base = self.model.base_model is self.model
        body = self.model.get_decoder() if is_own_base else self.model.base_model
        with attending(self.model, trial):
            output: Any = body(
                input_ids=tokens,
                position_ids=torch.arange(tokens.shape[1], device=self.device)[None],
                attention_mask=self._mask,
                use_cache=False,
            )
        hidden: Tensor = output.last_hidden_state
        return hidden[0]

    def next_tokens(self, hidden: Tensor) -> Tensor:
        """Likeliest next tokens, int64 ``[N]``, behind last hidden states ``[N, hidden]``."""
        head = self.model.get_output_embeddings()
        # What some models do to logits behind the head, a factor or a cap, leaves the largest where it is.
        return torch.cat([head(part).argmax(dim=-1) for part in hidden.split(_LOGITS_AT_ONCE)])

    @contextmanager
    def _checkpointed(self, trial: Trial) -> Iterator[None]:
        modules = [layer.module for layer in self.layers]
        replaced: list[Any] = []
        for module in modules:
            replaced.append(vars(module).get("forward"))
            module.forward = _recomputed(module, trial)
        try:
            yield
        finally:
            for module, forward in zip(modules, replaced):
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward


def check_device(name: str) -> None:
    """Raise ValueError for the simulated HPU, which runs the engine's steps and no other use of a model."""
    if name == "hpu-sim":
        raise ValueError(f"expected device auto, cpu, cuda or hpu to run a whole model on, got {name!r}")


def _recomputed(module: nn.Module, trial: Trial) -> Callable[..., Any]:
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        # Run again in the backward pass, when nothing attends for the model any more.
        with attending(module, trial):
            return forward(*args, **kwargs)

    return partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)

"""The layer of a checkpoint that predicts the token behind the next one (multi-token prediction).

It is transformers' ``MtpModel``, called as a model of one layer. Its entry at a position is computed from the
last hidden state of the served model there and from the token behind it.

Shapes: Q tokens of a step, N rows of logits, D hidden size.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from kernels_ref.units import index_dtype

_NEEDED = (5, 24)
_WHERE = "speculative_config: method 'mtp'"


def load_mtp(model: PreTrainedModel, path: str | Path) -> Any:
    """Read the layer of a model in memory, whose embedding and head it shares.

    Args:
        model: as transformers has loaded it.
        path: of its checkpoint.

    Raises:
        ValueError: the checkpoint has no such layer or several, or transformers is too old.
    """
    mtp_config(model.config, path)
    model.config.name_or_path, kind = str(path), _mtp_class()
    try:
        # By the name of its class transformers finds the names of weights.
        found = kind.__bases__[0].from_pretrained(model, device_map={"": str(model.device)})
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"{_WHERE}: the layer in {path} cannot be loaded: {error}") from error
    found.__class__ = kind
    return found.eval().requires_grad_(False)


def mtp_config(config: Any, path: str | Path) -> Any:
    """Return transformers' configuration of the layer of a model.

    Args:
        config: of the model.
        path: of it, for messages.

    Raises:
        ValueError: see ``load_mtp``.
    """
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < _NEEDED:
        raise ValueError(
            f"{_WHERE} needs transformers {'.'.join(map(str, _NEEDED))} or newer, "
            f"got {transformers.__version__}"
        )
    num_layers = getattr(config.get_text_config(), "num_mtp_layers", None) or 0
    if num_layers != 1:
        raise ValueError(
            f"{_WHERE} needs a checkpoint with one layer of multi-token prediction (num_mtp_layers=1), "
            f"got {num_layers} in {path}"
        )
    return config.get_mtp_config()


def keep_hidden(model: PreTrainedModel, hidden: torch.Tensor) -> None:
    """Let a model write the last hidden states of each step to the first rows of ``hidden``, ``[Q, D]``."""
    decoder: nn.Module = model.get_decoder()
    decoder.register_forward_hook(partial(_write_output, hidden))


def _write_output(hidden: torch.Tensor, module: nn.Module, args: Any, output: Any) -> None:
    write_rows(hidden, output[0][0])


def write_rows(target: torch.Tensor, rows: torch.Tensor) -> None:
    """Write the first rows of a tensor, as an operation on all of it: some devices have no other."""
    places = torch.arange(len(rows), dtype=index_dtype(rows.device), device=rows.device)
    target.index_copy_(0, places, rows.to(target.dtype))


@cache
def _mtp_class() -> Any:
    from transformers.modeling_layers import MtpModel

    class NextTokens(MtpModel):
        """Runs the layer over flattened steps.

        Its calls return hidden states at ``logits_to_keep`` in place of logits: see ``head``.
        """

        states: tuple[torch.Tensor, torch.Tensor] | None = None

        def attach(self, hidden: torch.Tensor, kept: torch.Tensor) -> None:
            """Read hidden states from the first rows of ``hidden``; write results to those of ``kept``."""
            self.states = (hidden, kept)

        def get_output_embeddings(self) -> nn.Module:
            """The head."""
            head: nn.Module = self.shared_head
            return head

        def head(self, hidden_states: torch.Tensor) -> torch.Tensor:
            """From hidden states ``[N, D]`` to logits ``[N, V]``."""
            logits: torch.Tensor = self._project_to_logits(hidden_states)
            return logits

        def create_masks_for_mtp_layer(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            """The mask of the call where it has one for our attention; else that of transformers."""
            if self._mask is not None:
                return {"attention_mask": self._mask}
            masks: dict[str, Any] = super().create_masks_for_mtp_layer(*args, **kwargs)
            return masks

        def forward(  # type: ignore[override]
            self,
            input_ids: torch.Tensor,
            position_ids: torch.Tensor | None = None,
            attention_mask: torch.Tensor | None = None,
            use_cache: bool = False,
            logits_to_keep: torch.Tensor | int = 0,
        ) -> CausalLMOutput:
            """Compute the layer for tokens that follow those of ``position_ids``, ``[1, Q]`` both.

            Without ``attach``, embeddings take the place of hidden states, for trials.
            """
            num_tokens = input_ids.shape[1]
            if position_ids is None:
                position_ids = torch.arange(num_tokens, device=input_ids.device)[None]
            is_ours = attention_mask is not None and attention_mask.ndim == 4
            self._mask = attention_mask if is_ours else None
            embeds = self.embed_tokens(input_ids)
            before = embeds if self.states is None else self.states[0][:num_tokens][None]
            hidden = self.forward_layer(0, before, position_ids + 1, None, inputs_embeds=embeds)
            if isinstance(logits_to_keep, torch.Tensor):
                hidden = hidden[:, logits_to_keep]
            if self.states is not None:
                write_rows(self.states[1], hidden[0])
            return CausalLMOutput(logits=hidden)

    return NextTokens

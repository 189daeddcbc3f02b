"""The layer of a checkpoint that predicts the token behind the next one (multi-token prediction).

It is transformers' ``MtpModel``, called as a model of one layer. Its entry at a position is computed from the
last hidden state of the served model there and from the token behind it. Of several layers the first one is
called: entries of a further layer need its results for the tokens before them, across steps.

Shapes: Q tokens of a step, N rows of logits, D hidden size.
"""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from hpu_duo.modeling.loading import build_without_weights
from hpu_duo.modeling.quantised.checkpoint import stored_tensors
from kernels_ref.units import index_dtype

_NEEDED = (5, 24)
_WHERE = "speculative_config: method 'mtp'"
_OWN = ("layers.", "shared_post_norm.")
"""Beginnings of the names of what a layer does not share with its model."""


def load_mtp(model: PreTrainedModel, path: str | Path, config: Any, dtype: torch.dtype) -> Any:
    """Read the layer of a model in memory, whose embedding and head it shares, and dequantise it.

    Args:
        model: as transformers has loaded it, or one rank's share of it.
        path: of its checkpoint.
        config: transformers' configuration of the whole model.
        dtype: of the layer.

    Raises:
        ValueError: the checkpoint has no such layer, or transformers is too old.
    """
    config = _with_one_layer(config, path)
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    whole, kind = build_without_weights(path, config, dtype), layer_class()
    stored = stored_tensors(path, dtype)
    try:
        with ExitStack() as stack:
            for context in kind.get_init_context(dtype, False, False, None):
                stack.enter_context(context)
            # By the name of its class transformers finds the names of weights.
            found = kind.__bases__[0](whole, 1)
        pattern = kind.get_mtp_weights_regex(whole)
        report, _ = convert_and_load_state_dict_in_model(
            found,
            {name: each for name, each in stored.items() if pattern.search(name)},
            LoadStateDictConfig(
                weight_mapping=found.get_weight_conversions(whole),
                device_map={"": str(model.device)},
                dtype=dtype,
            ),
        )
        if missing := sorted(name for name in report.missing_keys if name.startswith(_OWN)):
            raise ValueError(f"{', '.join(missing[:5])} are missing")
        wrong = [
            f"expected {name} of shape {list(expected)}, got {list(shape)}"
            for name, shape, expected in sorted(report.mismatched_keys)
        ]
        if wrong := [*wrong, *report.conversion_errors.values()]:
            raise ValueError("; ".join(wrong[:5]))
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"{_WHERE}: the layer in {path} cannot be loaded: {error}") from error
    found.__class__ = kind
    found.tie_with_main_model(model)
    found.config.vocab_size = model.config.get_text_config().vocab_size  # of a rank, fewer
    return found.eval().requires_grad_(False)


def mtp_config(config: Any, path: str | Path) -> Any:
    """Return transformers' configuration of the first layer of a model.

    Args:
        config: of the model.
        path: of it, for messages.

    Raises:
        ValueError: see ``load_mtp``.
    """
    return _with_one_layer(config, path).get_mtp_config()


def _with_one_layer(config: Any, path: str | Path) -> Any:
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < _NEEDED:
        raise ValueError(
            f"{_WHERE} needs transformers {'.'.join(map(str, _NEEDED))} or newer, "
            f"got {transformers.__version__}"
        )
    config = deepcopy(config)
    text_config = config.get_text_config()
    if not getattr(text_config, "num_mtp_layers", None):
        raise ValueError(
            f"{_WHERE} needs a checkpoint with a layer of multi-token prediction (num_mtp_layers), "
            f"got none in {path}"
        )
    text_config.num_mtp_layers = 1
    for name in ("mtp_layer_types", "mtp_mlp_layer_types"):
        if types := getattr(text_config, name, None):
            setattr(text_config, name, types[:1])
    return config


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
def layer_class() -> Any:
    """Return the class of such layers, a subclass of transformers' ``MtpModel``."""
    from transformers.modeling_layers import MtpModel

    class NextTokens(MtpModel):
        """Runs the layer over flattened steps.

        Its calls return hidden states at ``logits_to_keep`` in place of logits: see ``head``.
        """

        states: tuple[torch.Tensor, torch.Tensor] | None = None

        @property
        def own_modules(self) -> nn.Module:
            """All modules that it does not share with its model."""
            named = {name.rstrip("."): getattr(self, name.rstrip("."), None) for name in _OWN}
            return nn.ModuleDict({name: each for name, each in named.items() if each is not None})

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

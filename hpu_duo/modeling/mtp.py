"""Layers of a checkpoint that predict tokens behind the next one (multi-token prediction).

They are those of transformers' ``MtpModel``, called as a model of as many layers. The first layer's entry at
a position is computed from the last hidden state of the served model there and from the token behind it; that
of a further layer from that token too, and from the result of the layer before for the token before. Entries
of layer ``i`` for the first ``i`` tokens mean nothing, and are hidden from other tokens.

Shapes: Q tokens of a step, N rows, M tokens of each, D hidden size, n layers.
"""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from graphs import BatchShape
from hpu_duo.modeling.attention import RunningStep
from hpu_duo.modeling.loading import build_without_weights
from hpu_duo.modeling.quantised.checkpoint import stored_tensors
from kernels_ref import Step
from kernels_ref.units import index_dtype

_NEEDED = (5, 24)
_WHERE = "speculative_config: method 'mtp'"
_OWN = ("layers.", "shared_post_norm.")
"""Beginnings of the names of what a layer does not share with its model."""


class HiddenStates(NamedTuple):
    """Tensors that stay on the device between steps; tuples have one for each layer.

    Attributes:
        served: last hidden states of the served model in a step, ``[Q, D]``.
        chained: what layers read in a draft in place of hidden states, and their results, n of ``[N, D]``.
        kept: results of layers at the step's rows of logits, n of ``[N * M, D]``.
        carried: results of all layers but the last one for the token before the first one of each row,
            n - 1 of ``[N, D]``.
        ends: the same at the last token of each block, n - 1 of ``[blocks + 1, D]``; the null block is last.
        sampled: tokens of the rows of logits, int32 ``[N * M]``.
        block_size: tokens of a block.
    """

    served: torch.Tensor
    chained: tuple[torch.Tensor, ...]
    kept: tuple[torch.Tensor, ...]
    carried: tuple[torch.Tensor, ...]
    ends: tuple[torch.Tensor, ...]
    sampled: torch.Tensor
    block_size: int

    @classmethod
    def zeros(
        cls,
        largest: BatchShape,
        decode_len: int,
        blocks: tuple[int, int],
        num_layers: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> HiddenStates:
        """Allocate them for the largest step, and blocks: their number, and tokens of each."""
        num_rows, (num_blocks, block_size) = largest.num_logits, blocks

        def several(number: int, length: int) -> tuple[torch.Tensor, ...]:
            size = (length, hidden_size)
            return tuple(torch.zeros(size, dtype=dtype, device=device) for _ in range(number))

        return cls(
            several(1, max(largest.query_len, num_rows))[0],
            several(num_layers, num_rows),
            several(num_layers, num_rows * decode_len),
            several(num_layers - 1, num_rows),
            several(num_layers - 1, num_blocks + 1),
            torch.zeros(num_rows * decode_len, dtype=torch.int32, device=device),
            block_size,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        several = (*self.chained, *self.kept, *self.carried, *self.ends)
        return sum(each.nbytes for each in (self.served, self.sampled, *several))

    def of_token_before(self, hidden: torch.Tensor, number: int, step: Step) -> torch.Tensor:
        """From the results of layer ``number``, ``[1, Q, D]``, to those for the token before each token."""
        tensors, num_tokens = step.tensors, hidden.shape[1]
        row = tensors.row.clamp(max=len(tensors.row_query_start) - 1)
        token = torch.arange(num_tokens, dtype=row.dtype, device=row.device)
        is_first = tensors.row_query_start.index_select(0, row) == token
        place = torch.where(is_first, num_tokens + row, (token - 1).clamp(min=0))
        return torch.cat([hidden[0], self.carried[number]]).index_select(0, place)[None]

    def keep_ends(self, hidden: torch.Tensor, number: int, step: Step) -> None:
        """Write the results of layer ``number`` at the last tokens of blocks, from those of a step."""
        tensors, ends = step.tensors, self.ends[number]
        is_end = tensors.write_offset == self.block_size - 1
        block = torch.where(is_end, tensors.write_block, len(ends) - 1)
        ends.index_copy_(0, block.to(index_dtype(block.device)), hidden[0].to(ends.dtype))


def num_layers_of(text_config: Any, most: int) -> int:
    """Number of layers that draft, one for each draft; 0 without any.

    Args:
        text_config: of a model.
        most: drafts of a row in a step.
    """
    return min(getattr(text_config, "num_mtp_layers", None) or 0, most)


def load_mtp(model: PreTrainedModel, path: str | Path, config: Any, dtype: torch.dtype, most: int = 1) -> Any:
    """Read the layers of a model in memory, whose embedding and head they share, and dequantise them.

    Args:
        model: as transformers has loaded it, or one rank's share of it.
        path: of its checkpoint.
        config: transformers' configuration of the whole model.
        dtype: of the layers.
        most: drafts of a row in a step: further layers are left out.

    Raises:
        ValueError: the checkpoint has no such layer, or transformers is too old.
    """
    config = _with_layers(config, path, most)
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    whole, kind = build_without_weights(path, config, dtype), layer_class()
    stored = stored_tensors(path, dtype)
    try:
        with ExitStack() as stack:
            for context in kind.get_init_context(dtype, False, False, None):
                stack.enter_context(context)
            # By the name of its class transformers finds the names of weights.
            found = kind.__bases__[0](whole, config.get_text_config().num_mtp_layers)
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


def mtp_config(config: Any, path: str | Path, most: int = 1) -> Any:
    """Return transformers' configuration of the layers of a model that draft.

    Args:
        config: of the model.
        path: of it, for messages.
        most: drafts of a row in a step.

    Raises:
        ValueError: see ``load_mtp``.
    """
    return _with_layers(config, path, most).get_mtp_config()


def _with_layers(config: Any, path: str | Path, most: int) -> Any:
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < _NEEDED:
        raise ValueError(
            f"{_WHERE} needs transformers {'.'.join(map(str, _NEEDED))} or newer, "
            f"got {transformers.__version__}"
        )
    config = deepcopy(config)
    text_config = config.get_text_config()
    number = num_layers_of(text_config, most)
    if not number:
        raise ValueError(
            f"{_WHERE} needs a checkpoint with a layer of multi-token prediction (num_mtp_layers), "
            f"got none in {path}"
        )
    text_config.num_mtp_layers = number
    for name in ("mtp_layer_types", "mtp_mlp_layer_types"):
        if types := getattr(text_config, name, None):
            setattr(text_config, name, types[:number])
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
        """Runs the layers over flattened steps.

        Its calls return hidden states at ``logits_to_keep`` in place of logits: see ``head``.
        """

        states: HiddenStates | None = None

        @property
        def own_modules(self) -> nn.Module:
            """All modules that it does not share with its model."""
            named = {name.rstrip("."): getattr(self, name.rstrip("."), None) for name in _OWN}
            return nn.ModuleDict({name: each for name, each in named.items() if each is not None})

        def attach(self, states: HiddenStates, running: RunningStep) -> None:
            """Read hidden states from ``states``, and write results to them, in the step that runs."""
            self.states, self._running = states, running

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
            """Compute the layers for tokens that follow those of ``position_ids``, ``[1, Q]`` both.

            Without ``attach``, for trials, embeddings take the place of the served model's hidden states, and
            each layer reads the result of the one before for the same token.
            """
            num_tokens = input_ids.shape[1]
            if position_ids is None:
                position_ids = torch.arange(num_tokens, device=input_ids.device)[None]
            is_ours = attention_mask is not None and attention_mask.ndim == 4
            self._mask = attention_mask if is_ours else None
            embeds = self.embed_tokens(input_ids)
            states = self.states
            step = None if states is None else self._running.step
            hidden = embeds if states is None else states.served[:num_tokens][None]
            for number in range(self.num_mtp_layers):
                if states is not None and step is not None:
                    if step.is_draft:
                        hidden = states.chained[number][:num_tokens][None]
                    elif number:
                        states.keep_ends(hidden, number - 1, step)
                        hidden = states.of_token_before(hidden, number - 1, step)
                hidden = self.forward_layer(number, hidden, position_ids + 1, None, inputs_embeds=embeds)
                wanted = hidden[:, logits_to_keep] if isinstance(logits_to_keep, torch.Tensor) else hidden
                if states is not None and step is not None:
                    results = states.chained if step.is_draft else states.kept
                    write_rows(results[number], wanted[0])
            return CausalLMOutput(logits=wanted)

    return NextTokens

"""A frozen transformers model whose attention is mixed by gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hpu_duo.lab.identify.attention import Band, Weighing, banded_attention, full_attention
from hpu_duo.lab.tasks.passkeys import NEEDLE, QUESTION
from hpu_duo.lab.tasks.words import NAMES, PASSKEY_WORDS
from hpu_duo.modeling.attention import AttentionCall, Trial, attending, placeholder_mask
from hpu_duo.modeling.loading import load_model, read_config, resolve_dtype
from hpu_duo.modeling.probe import DecoderLayer, pattern_rows, probe


class FullFrom(str, Enum):
    """The model whose full attention a gate mixes in."""

    TEACHER = "teacher"
    """The unchanged model, as in the published code: no backward pass through full attention."""
    OWN = "own"
    """The gated model on its own hidden states, as in the paper's formula."""


def weighing_of(call: AttentionCall, sinks: Tensor | None) -> Weighing:
    """Return the rule by which the layer of this call weighs keys."""
    return Weighing(call.scale, call.softcap, sinks)


def attend_as_model(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """The model's own attention: causal, and in the layer's window if it has one. ``[B, H, T, D]``."""
    weighing = weighing_of(call, sinks)
    if call.sliding_window is None:
        return full_attention(q, k, v, weighing)
    return banded_attention(q, k, v, weighing, Band(0, call.sliding_window))


class TeacherAttention(Trial):
    """The model's own attention; keeps the outputs of the layers named.

    Attributes:
        outputs: ``[B, T, H, D]`` by identity of the attention module.
    """

    def __init__(self, calls: Mapping[int, AttentionCall], kept: frozenset[int]) -> None:
        self._calls, self._kept = calls, kept
        self.outputs: dict[int, Tensor] = {}

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Full attention of one layer: ``[B, heads, T, D]`` each to ``[B, T, H, D]``."""
        out = attend_as_model(self._calls[id(module)], q, k, v, sinks).transpose(1, 2).contiguous()
        if id(module) in self._kept:
            self.outputs[id(module)] = out
        return out


class GatedAttention(Trial):
    """``gate * full + (1 - gate) * streaming`` for each KV head, and its query heads with it.

    Args:
        calls: the recorded attention call of each layer.
        gates: ``[K]`` in [0, 1] by identity of the attention module; layers without gates attend as the
            model does.
        band: keys that streaming heads see.
        teacher: outputs of ``TeacherAttention`` on the same text; None mixes in the gated model's own.
    """

    def __init__(
        self,
        calls: Mapping[int, AttentionCall],
        gates: Mapping[int, Tensor],
        band: Band,
        teacher: Mapping[int, Tensor] | None,
    ) -> None:
        self._calls, self._gates, self._band, self._teacher = calls, gates, band, teacher

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Mixed attention of one layer: ``[B, heads, T, D]`` each to ``[B, T, H, D]``."""
        call = self._calls[id(module)]
        gates = self._gates.get(id(module))
        if gates is None:
            return attend_as_model(call, q, k, v, sinks).transpose(1, 2).contiguous()
        streaming = banded_attention(q, k, v, weighing_of(call, sinks), self._band).transpose(1, 2)
        if self._teacher is None:
            full = attend_as_model(call, q, k, v, sinks).transpose(1, 2)
        else:
            full = self._teacher[id(module)]
        gate_H1 = gates.repeat_interleave(call.num_heads // call.num_kv_heads).unsqueeze(-1).to(q.dtype)
        return torch.lerp(streaming, full, gate_H1).contiguous()


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
        rows: row of each layer's gates: layers that share keys and values have the same.
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
        self.num_kv_heads = kv_heads[0]
        self.rows = pattern_rows(layers)
        self.num_layers = max(self.rows) + 1
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
        """Say for each row of gates whether it is used: its layers have no window, or one of ``num_tokens``.

        In the other layers all heads stream, whatever a pattern says of them.
        """
        windows = [layer.call.sliding_window for layer in self.layers if layer.call.source is None]
        return tuple(window is None or window >= num_tokens for window in windows)

    @torch.no_grad()
    def teach(self, ids: Tensor, positions: Tensor, gated: Sequence[bool], full_from: FullFrom) -> Teaching:
        """Run the unchanged model over a text.

        Args:
            ids: int64 ``[T]``.
            positions: int64 ``[N]``, where the hidden state is wanted.
            gated: for each row of gates, whether it is used.
            full_from: attention outputs are kept only if gates mix in the teacher's.
        """
        kept = frozenset(id(layer.attention) for layer, row in zip(self.layers, self.rows) if gated[row])
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
        """Last hidden states ``[N, hidden]`` with gates ``[rows, K]``; see ``GatedAttention`` for the rest.

        Each layer keeps its input only, and is run again in the backward pass.
        """
        by_module = {
            id(layer.attention): gates[row] for layer, row in zip(self.layers, self.rows) if gated[row]
        }
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


_ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
)
_SPELLING = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa "
    "quebec romeo sierra tango uniform victor whiskey xray yankee zulu"
)


@dataclass(frozen=True)
class PasskeyForm:
    """The texts around passkeys; ``{label}`` names the passkey, ``{words}`` is its value.

    Attributes:
        opening, closing: around the document, before the first question.
        needle: the sentence that hides a passkey.
        question, answer: the question for it, and the right answer, whose tokens are the passkey's tokens.
        separator: after each answer.
        labels: names that tell the passkeys of a document apart, in the order in which they are used.
        words: vocabulary of the passkeys.
        repeats: whether a word may occur twice in a document; without, no answer is ambiguous.
        shuffles: whether a document takes any of the labels, or the first ones in order.
        ends: whether an answer ends with the end-of-text token.
    """

    opening: str
    closing: str
    needle: str
    question: str
    answer: str
    separator: str
    labels: tuple[str, ...]
    words: tuple[str, ...]
    repeats: bool
    shuffles: bool
    ends: bool

    def check(self, num_passkeys: int, passkey_words: int) -> None:
        """Raise ValueError unless a document can hold that many passkeys of that many words."""
        if num_passkeys < 1 or passkey_words < 1:
            raise ValueError(
                f"expected at least one passkey of at least one word, got {num_passkeys} of {passkey_words}"
            )
        if num_passkeys > len(self.labels):
            raise ValueError(f"expected at most {len(self.labels)} passkeys, got {num_passkeys}")
        if not self.repeats and num_passkeys * passkey_words > len(self.words):
            raise ValueError(
                f"expected num_passkeys * passkey_words <= {len(self.words)}, since no word may occur twice, "
                f"got {num_passkeys} * {passkey_words}"
            )


class Form(str, Enum):
    """The forms by name."""

    ORDINALS = "ordinals"
    """For models in general: "the third passkey", words of the spelling alphabet."""
    NAMES = "names"
    """For the built-in model, which was trained on it: "the passkey for Ada", words that never repeat."""

    @property
    def texts(self) -> PasskeyForm:
        """The form itself."""
        return _FORMS[self]


_FORMS = {
    Form.ORDINALS: PasskeyForm(
        opening="Here is a long text. Some passkeys are hidden in it and will be asked for at the end.\n\n",
        closing="\n\nThe text ends here.\n\n",
        needle="Keep this in mind: the {label} passkey is {words}.",
        question="What is the {label} passkey? The {label} passkey is",
        answer=" {words}.",
        separator="\n\n",
        labels=tuple(_ORDINALS.split()),
        words=tuple(_SPELLING.split()),
        repeats=True,
        shuffles=False,
        ends=False,
    ),
    Form.NAMES: PasskeyForm(
        opening="",
        closing="",
        needle=NEEDLE.replace("{name}", "{label}"),
        question=QUESTION.replace("{name}", "{label}"),
        answer=" {words}.",
        separator="",
        labels=NAMES,
        words=PASSKEY_WORDS,
        repeats=False,
        shuffles=True,
        ends=True,
    ),
}

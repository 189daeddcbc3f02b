"""Modules with recurrences, as transformers wrote them, over the rows of flattened batches.

Their code calls functions for convolutions over time by name, and reads and writes states through the cache
that it is called with. In a step both are ours; projections, gates and norms stay as they are.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import silu

from hpu_duo.modeling.attention import LayerKind, RunningStep
from kernels_ref import Convolution, Recurrence, Step, StepParts, StepTensors
from kernels_ref.recurrent import DeltaInputs, DeltaRule, StateSpace, causal_convolution
from kernels_ref.recurrent.kind import prepare_recurrences
from kernels_ref.step import DecodeRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STATES = "hpu_duo_states"


class Scan(NamedTuple):
    """A call of a state space: inputs of new tokens, see ``StateSpace.inputs``, and limits of their steps."""

    x: torch.Tensor
    step: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    bias: torch.Tensor | None
    limits: tuple[float, float]


_UPDATE = "update_conv_state"


def _convolve(
    windows_QKC: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """transformers' ``causal_conv1d_fn``, of what ``update_conv_state`` returned: ``[1, C, Q]``."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"expected a convolution with silu or no activation, got {activation!r}")
    found = causal_convolution(windows_QKC, weight, bias)
    if activation is not None:
        found = silu(found)
    return found.t()[None]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: RecurrentStates,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, RecurrentStates]:
    """transformers' ``chunk_gated_delta_rule``, of the states that ``get_recurrent_state`` returned."""
    inputs = DeltaInputs.of(*(x[0] for x in (query, key, value, g, beta)), normalises=use_qk_l2norm_in_kernel)
    return initial_state.attend(inputs)[None].to(query.dtype), initial_state


def _scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: RecurrentStates,
    z: None = None,
    **_: Any,
) -> tuple[torch.Tensor, RecurrentStates]:
    """transformers' ``mamba2_chunk_scan``, in float32, of the states of ``get_recurrent_state``."""
    if not dt_softplus or z is not None:
        raise ValueError("expected a state space whose steps are a softplus, without a gate")
    limits = (float(dt_limit[0]), float(dt_limit[1]))
    x = hidden_states[0]
    found = initial_states.scan(Scan(x, dt[0], A, B[0], C[0], dt_bias, limits))
    return (found + x.float() * D.float()[:, None])[None], initial_states


def _scan_one(
    state: RecurrentStates,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    *,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor,
    dt_softplus: bool = False,
    **_: Any,
) -> torch.Tensor:
    """transformers' ``mamba2_selective_state_update`` of one token: ``[1, H, P]``, float32.

    Steps have the limits that they have in texts, whatever is passed here.
    """
    limits = state.limits
    found, _state = _scan(
        *(hidden_states[None], dt[None, ..., 0], A[:, 0, 0], B[None], C[None]),
        D=D[:, 0],
        dt_bias=dt_bias[:, 0],
        dt_softplus=dt_softplus,
        dt_limit=limits,
        initial_states=state,
    )
    return found[0] if z is None else found[0] * silu(z.float())


def _not_fused(*_: Any, **__: Any) -> None:
    """transformers' ``mamba2_split_conv1d_scan_combined``, for training: None has a module go on."""


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "causal_conv1d_update": _convolve,
    "mamba2_chunk_scan": _scan,
    "mamba2_selective_state_update": _scan_one,
    "mamba2_split_conv1d_scan_combined": _not_fused,
    "torch_chunk_gated_delta_rule": _attend,
    "torch_recurrent_gated_delta_rule": _attend,
}
"""Our functions by the names that transformers' modules call."""

_NEEDS_STATES = re.compile(r"(^|_)(chunk|recurrent|scan|selective|conv1d|ssm|ssd|kda|lru)(_|$)")
"""Names of functions that read several tokens, or a state."""


def _forward_of(module: type[nn.Module]) -> FunctionType | None:
    """Return the function of a class that calls for states by our joint; None for other classes."""
    forward = inspect.unwrap(module.forward)
    if not isinstance(forward, FunctionType) or _UPDATE not in forward.__code__.co_names:
        return None
    return forward if "cache" in inspect.signature(forward).parameters else None


def missing_functions(module: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of functions that a module with states calls and that are not ours."""
    forward = _forward_of(module)
    if forward is None:
        return ()
    called = (name for name in forward.__code__.co_names if _NEEDS_STATES.search(name))
    return tuple(
        sorted(
            name
            for name in called
            if name not in _FUNCTIONS and isinstance(forward.__globals__.get(name), FunctionType)
        )
    )


def has_states(module: type[nn.Module]) -> bool:
    """Whether a module has states, all of which are served."""
    return _forward_of(module) is not None and not missing_functions(module)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _with_states(module: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass with the same code of ``forward``, whose functions and cache are ours."""
    if module in _classes:
        return _classes[module]
    plain = _forward_of(module)
    assert plain is not None, f"expected {module} with states"
    names = {name: value for name, value in plain.__globals__.items() if name != "__name__"} | _FUNCTIONS
    same = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    same.__kwdefaults__ = plain.__kwdefaults__

    def forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs["cache"] = getattr(self, _STATES)
        return same(self, hidden_states, *args, **kwargs)

    members = {"forward": forward, "__module__": module.__module__}
    return _classes.setdefault(module, type(module.__name__, (module,), members))


class RecurrentStates(nn.Module):
    """The states of a module with a recurrence as buffers, and the cache that its code is called with.

    Args:
        kinds: of the states.
        tensors: of each kind, those of all rows.
        running: the step.
    """

    convolution_inputs: torch.Tensor

    def __init__(
        self,
        kinds: Sequence[Recurrence],
        tensors: Iterable[Iterable[torch.Tensor]],
        running: RunningStep,
    ) -> None:
        super().__init__()
        self.kinds, self.running = tuple(kinds), running
        for kind, of_kind in zip(kinds, tensors, strict=True):
            for each, tensor in zip(kind.tensors, of_kind, strict=True):
                self.register_buffer(f"{kind.name}_{each.name}", tensor, persistent=False)

    @property
    def step(self) -> Step:
        """The running step."""
        if self.running.step is None:
            raise ValueError(
                "expected a step of an engine, got a call of a module with states outside of one"
            )
        return self.running.step

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return nothing, so that inputs always go through ``update_conv_state``."""

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Return the inputs that each token's output reads, ``[Q, K, C]``, and update the rows' states.

        Args:
            conv_states: inputs of the new tokens, ``[1, C, Q]``.
        """
        (kind,) = (kind for kind in self.kinds if isinstance(kind, Convolution))
        return kind.windows(conv_states[0].t(), self.convolution_inputs, self.step)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> RecurrentStates:
        """Return the states themselves, which our functions read and update."""
        return self

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0) -> None:
        """Do nothing: states are up to date."""

    def attend(self, inputs: DeltaInputs) -> torch.Tensor:
        """Return what tokens read by the gated delta rule, float32 ``[Q, H, V]``, and update the states."""
        (kind,) = (kind for kind in self.kinds if isinstance(kind, DeltaRule))
        return kind.attend(inputs, self._state_of(kind), self.step)

    @property
    def limits(self) -> tuple[float, float]:
        """Limits of the steps of a state space."""
        return self._space.limits

    def scan(self, given: Scan) -> torch.Tensor:
        """Return what tokens read of a state space, float32 ``[Q, H, P]``, and update the states."""
        kind = self._space
        inputs = kind.inputs(given.x, given.step, given.a, given.b, given.c, given.bias)
        return kind.attend(inputs, self._state_of(kind), self.step)

    @property
    def _space(self) -> StateSpace:
        (kind,) = (kind for kind in self.kinds if isinstance(kind, StateSpace))
        return kind

    def _state_of(self, kind: Recurrence) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(self, f"{kind.name}_{each.name}") for each in kind.tensors)


@dataclass
class _Recorder:
    """The cache of a trial call: records the states that a module asks for."""

    kinds: list[Recurrence] = field(default_factory=list)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return nothing: there is no text yet."""

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Record a convolution."""
        if conv_kernel_size is None or state_idx:
            raise ValueError("expected one convolution of a stated size in a module")
        channels, num_tokens = conv_states.shape[1:]
        self.kinds.append(Convolution(channels, conv_kernel_size, conv_states.dtype))
        return conv_states.new_zeros(num_tokens, conv_kernel_size, channels)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> _Recorder:
        """Return the recorder, which our functions call."""
        if state_idx:
            raise ValueError("expected one recurrence in a module")
        return self

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0) -> None:
        """Record nothing: ``attend`` has recorded the state."""

    def attend(self, inputs: DeltaInputs) -> torch.Tensor:
        """Record a gated delta rule."""
        num_heads, value_dim = inputs.v.shape[1:]
        kind = DeltaRule(num_heads=num_heads, key_dim=inputs.k.shape[2], value_dim=value_dim)
        self.kinds.append(kind)
        return torch.zeros_like(inputs.v)

    def scan(self, given: Scan) -> torch.Tensor:
        """Record a state space."""
        num_heads, head_dim = given.x.shape[1:]
        num_groups, state_dim = given.b.shape[1:]
        kind = StateSpace(
            num_heads=num_heads,
            num_groups=num_groups,
            head_dim=head_dim,
            state_dim=state_dim,
            limits=given.limits,
        )
        self.kinds.append(kind)
        return torch.zeros_like(given.x, dtype=torch.float32)


@dataclass(frozen=True)
class RecurrentLayer:
    """A decoder layer whose rows have states instead of keys and values.

    Attributes:
        module: the layer.
        mixer: the module in it that mixes tokens.
        kinds: of a row's states.
    """

    module: nn.Module
    mixer: nn.Module
    kinds: tuple[Recurrence, ...]

    def states_in(
        self, dtype: torch.dtype, slack: int = 0, *, drafts: bool = False
    ) -> tuple[Recurrence, ...]:
        """Return the kinds of states of a model that computes in ``dtype``.

        Args:
            slack: tokens of a decode that can be taken back.
            drafts: whether the model drafts over its states.
        """
        kinds = (replace(kind, slack=slack, drafts=drafts) for kind in self.kinds)
        return tuple(replace(kind, dtype=dtype) if isinstance(kind, Convolution) else kind for kind in kinds)

    def attach(
        self,
        kinds: Sequence[Recurrence],
        tensors: Iterable[Iterable[torch.Tensor]],
        running: RunningStep,
    ) -> None:
        """Let the module read and write the states of rows, for good."""
        setattr(self.mixer, _STATES, RecurrentStates(kinds, tensors, running))
        self.mixer.__class__ = _with_states(type(self.mixer))


def number_of(name: str, path: str) -> int:
    """Return the number of a decoder layer among all layers.

    Args:
        name: of the model's class.
        path: of the layer in the model.

    Raises:
        ValueError: it is a part of a layer.
    """
    number = path.rpartition(".")[2]
    if not number.isdigit():
        raise ValueError(
            f"{name} cannot be served: expected attention in layers of one list, got some in {path!r}, "
            "a part of a layer, whose weights other layers may share"
        )
    return int(number)


@torch.inference_mode()
def recurrent_layers(model: PreTrainedModel) -> tuple[RecurrentLayer, ...]:
    """Return the layers with states in order; a model without storage is enough.

    Raises:
        ValueError: a module with states cannot be served.
    """
    found = [(path, module) for path, module in model.named_modules() if has_states(type(module))]
    width = getattr(model.config.get_text_config(), "hidden_size", 0)
    layers = []
    for path, mixer in found:
        parent, name = model.get_submodule(path.rpartition(".")[0]), type(mixer).__name__
        device = next(mixer.parameters()).device
        recorder = _Recorder()
        try:
            with _swapped(mixer, recorder):
                # Modules have another branch for one token, which does not show all.
                mixer(torch.zeros(1, 2, width, dtype=model.dtype, device=device))
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
            raise ValueError(f"{name} cannot be served: it fails on two tokens: {error}") from error
        layers.append(RecurrentLayer(parent, mixer, tuple(recorder.kinds)))
    return tuple(layers)


def lists_of(model: nn.Module, layers: Collection[nn.Module]) -> list[nn.ModuleList]:
    """Return the lists of modules that have all these layers."""
    lists = (each for each in model.modules() if isinstance(each, nn.ModuleList))
    return [each for each in lists if set(layers) <= set(each)]


def layers_besides(model: nn.Module, layers: Collection[nn.Module]) -> list[nn.Module]:
    """Return the decoder layers other than these, such as those without attention and states."""
    return [layer for members in lists_of(model, layers) for layer in members if layer not in layers]


@contextmanager
def _swapped(mixer: nn.Module, states: Any) -> Iterator[None]:
    before = type(mixer)
    mixer.__class__ = _with_states(before)
    vars(mixer)[_STATES] = states
    try:
        yield
    finally:
        mixer.__class__ = before
        del vars(mixer)[_STATES]


class Cut(NamedTuple):
    """Tokens of one row in a step.

    Attributes:
        start: tokens of the row before the step.
        num_new: those in it.
    """

    start: int
    num_new: int


def step_of(
    cuts: Sequence[Cut],
    kinds: Iterable[Recurrence],
    device: torch.device,
    num_padding: int = 0,
    decode_len: int = 1,
) -> Step:
    """Return a step of these rows, with what recurrences read.

    Args:
        num_padding: tokens of padding behind those of rows.
        decode_len: most tokens of a row, if the step is one of decodes.
    """
    starts, counts = zip(*cuts)
    row = [number for number, cut in enumerate(cuts) for _ in range(cut.num_new)] + [len(cuts)] * num_padding
    positions = [cut.start + place for cut in cuts for place in range(cut.num_new)] + [0] * num_padding
    begins = [sum(counts[:number]) for number in range(len(cuts))]

    def ints(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    given = {
        "positions": ints(positions),
        "row": ints(row),
        "causal_row": ints(row),
        "row_start": ints(starts),
        "row_num_new": ints(counts),
        "row_query_start": ints(begins),
    }
    tensors = StepTensors(**{name: given.get(name, ints(())) for name in StepTensors.__annotations__})
    parts = StepParts(causal=max(counts) > decode_len, shared=False, unique=True)
    plans = prepare_recurrences(kinds, parts, tensors)
    rows = DecodeRows.of(parts, tensors, decode_len)
    return Step(parts, tensors, decode_len, rows.token, rows.slot, plans)


def _empty_states(
    kinds: Sequence[Recurrence], num_rows: int, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], ...]:
    return tuple(
        tuple(
            torch.zeros(num_rows + 1, *each.shape, dtype=each.dtype, device=device) for each in kind.tensors
        )
        for kind in kinds
    )


@contextmanager
def recurring(
    layers: Sequence[RecurrentLayer], num_rows: int, length: int, device: torch.device
) -> Iterator[None]:
    """Let modules with states run a flat batch of ``num_rows`` texts of ``length`` tokens, in float32."""
    cuts = [Cut(0, length)] * num_rows
    before = [type(layer.mixer) for layer in layers]
    for layer in layers:
        kinds = layer.states_in(torch.float32)
        running = RunningStep(step_of(cuts, kinds, device))
        states = RecurrentStates(kinds, _empty_states(kinds, num_rows, device), running)
        # Not a submodule, whose buffers would be converted with the layer's weights.
        vars(layer.mixer)[_STATES] = states
        layer.mixer.__class__ = _with_states(type(layer.mixer))
    try:
        yield
    finally:
        for layer, plain in zip(layers, before):
            layer.mixer.__class__ = plain
            del vars(layer.mixer)[_STATES]


_LENGTHS = (9, 6, 11)
_STEPS = (((0, 4), (0, 1), (0, 2)), ((4, 1), (1, 4), (2, 8)), ((5, 4), (5, 1), (10, 1)))
"""Start and number of new tokens of each row, step by step."""
_TOLERANCE = 1e-4


@torch.inference_mode()
def try_recurrences(model: PreTrainedModel, layers: Sequence[RecurrentLayer]) -> None:
    """Compare rows of different lengths, cut into different chunks, with transformers' own run of each alone.

    It runs one module of each kind, in float32.

    Raises:
        ValueError: they differ, so the module does something with neighbouring tokens that its states do not
            show.
    """
    kinds = {LayerKind(layer.mixer, layer.kinds): layer for layer in layers}
    for layer in kinds.values():
        mixer = copy.deepcopy(layer.mixer).float()
        device, width = next(mixer.parameters()).device, model.config.get_text_config().hidden_size
        generator = torch.Generator().manual_seed(0)
        texts = [torch.randn(1, length, width, generator=generator).to(device) for length in _LENGTHS]
        expected = [mixer(text) for text in texts]
        states = layer.states_in(torch.float32)
        running = RunningStep()
        found: list[list[torch.Tensor]] = [[] for _ in texts]
        with _swapped(mixer, RecurrentStates(states, _empty_states(states, len(texts), device), running)):
            for step in _STEPS:
                cuts = [Cut(*cut) for cut in step]
                running.step = step_of(cuts, states, device)
                pieces = [text[:, cut.start : cut.start + cut.num_new] for text, cut in zip(texts, cuts)]
                output = mixer(torch.cat(pieces, dim=1))
                for of_row, piece in zip(found, output.split([cut.num_new for cut in cuts], dim=1)):
                    of_row.append(piece)
        for of_row, alone in zip(found, expected):
            error = (torch.cat(of_row, dim=1) - alone).abs().max() / alone.abs().max().clamp(min=1e-6)
            if not error <= _TOLERANCE:
                raise ValueError(
                    f"{type(model).__name__} cannot be served: {type(layer.mixer).__name__} has other "
                    "results for a text in chunks, beside others, than transformers gives it alone (relative "
                    f"error {error.item():.2g})"
                )

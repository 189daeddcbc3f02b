"""Time and memory of a model whose weights, keys and values lie on a device, its host and a disk.

The formulas are those of FlexGen (Sheng et al., 2023, arXiv 2303.06865, and its published cost model), for
other sizes of heads, formats and KV budgets too. All are linear in the nine shares of a placement. Memory is
that which the engine of this package allocates, or as FlexGen counts it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hpu_duo.engine.on_host.attention import FAR_TILE_BYTES
from hpu_duo.modeling.weight_stream import buffer_numbers

BLOCK_SIZE = 128
"""Tokens of a block, of which a row's keys and values lie whole in one memory."""
NUM_AHEAD = 1
"""Layers that are loaded ahead of the one in use."""
UP, DOWN, READ, WRITE, COMPUTE = RESOURCES = (
    "host to device",
    "device to host",
    "disk to host",
    "host to disk",
    "compute",
)
"""Ways and processors that are used at the same time."""
Form = npt.NDArray[np.float64]
"""A value that is linear in the shares: factors in the order of ``Placement``, then a constant, [10]."""


class Placement(NamedTuple):
    """Shares of weights, of keys and values, and of activations by where they lie; each three sum to 1."""

    weights_device: float
    weights_host: float
    weights_disk: float
    kv_device: float
    kv_host: float
    kv_disk: float
    activations_device: float
    activations_host: float
    activations_disk: float

    def __str__(self) -> str:
        return "  ".join(
            f"{name} {' / '.join(f'{100 * share:.3g}' for share in self[first : first + 3])} %"
            for name, first in (("weights", 0), ("KV", 3), ("activations", 6))
        )

    @classmethod
    def parse(cls, text: str) -> Placement:
        """The placement of six percentages: device and host of weights, KV and activations; the rest is disk.

        Raises:
            ValueError: there are not six numbers, one is below 0, or two add up to more than 100.
        """
        if text == "auto":
            raise ValueError(
                "expected percentages as offload_policy, which hpu-duo plan-offload finds, got 'auto'"
            )
        try:
            given = [float(each) for each in text.split(",")]
        except ValueError:
            given = []
        if len(given) != 6 or not all(0 <= each <= 100 for each in given):
            raise ValueError(
                "expected six percentages w_dev,w_host,kv_dev,kv_host,act_dev,act_host "
                f"of 0 to 100, got {text!r}"
            )
        shares: list[float] = []
        for name, device, host in zip(("weights", "KV", "activations"), given[::2], given[1::2]):
            if device + host > 100:
                raise ValueError(
                    f"expected percentages of {name} that add up to 100 at most, got {device:g} and {host:g}"
                )
            shares += [device / 100, host / 100, (100 - device - host) / 100]
        return cls(*shares)


class Policy(NamedTuple):
    """Decisions that the search makes.

    Attributes:
        batch_size: rows that a layer computes at once.
        num_batches: batches that go through a layer before the next one is loaded.
        placement: where weights, keys and values, and activations lie.
        host_attention: whether decodes attend on the host to what lies there or on the disk; otherwise it
            moves to the device.
    """

    batch_size: int
    num_batches: int
    placement: Placement
    host_attention: bool

    @property
    def num_rows(self) -> int:
        """Rows of all batches."""
        return self.batch_size * self.num_batches


@dataclass(frozen=True)
class OffloadModel:
    """Sizes of a model of equal layers; bytes are those of the formats in which things are stored.

    Attributes:
        num_layers: decoder layers.
        hidden_size, intermediate_size: elements between layers, and inside a feed-forward network.
        num_heads, num_kv_heads, head_dim: of attention.
        layer_params: weights of a layer that a token is multiplied with.
        layer_bytes: of all its weights as they are stored and moved.
        kv_bytes: of keys and values of a token in a layer, as they are stored.
        resident_bytes: of what always stays on the device: the embedding table, the head and norms.
        vocab_size: logits of a row; 0 leaves them out of the memory.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_params: int
    layer_bytes: float
    kv_bytes: float
    resident_bytes: float = 0.0
    vocab_size: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value <= 0 and not (each.name in ("resident_bytes", "vocab_size") and value == 0):
                raise ValueError(f"expected {each.name} above 0, got {value}")

    @property
    def act_bytes(self) -> int:
        """Bytes of the hidden state of a token, in 16 bits."""
        return 2 * self.hidden_size

    @property
    def work_bytes(self) -> int:
        """Bytes that a token needs while a layer computes it, in 16 bits, without scores."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = (self.hidden_size + queries + 2 * keys) + 2 * queries + (queries + self.hidden_size)
        return 2 * (attention + self.intermediate_size + self.hidden_size)

    @property
    def pair_ops(self) -> int:
        """Operations of a query with one key and its value, over all heads."""
        return 4 * self.num_heads * self.head_dim


@dataclass(frozen=True)
class OffloadWork:
    """Requests of one length.

    Attributes:
        prompt_len, output_len: tokens of each request.
        kv_share: share of a request's tokens whose keys and values are stored at most, by a KV budget such as
            H2O's at 0.2; 1 = all of them.
    """

    prompt_len: int
    output_len: int
    kv_share: float = 1.0

    def __post_init__(self) -> None:
        if self.prompt_len < 1 or self.output_len < 1:
            raise ValueError(
                f"expected at least one token of prompt and of output, got {self.prompt_len} and "
                f"{self.output_len}"
            )
        if not 0 < self.kv_share <= 1:
            raise ValueError(
                f"expected a share of keys and values above 0 and at most 1, got {self.kv_share}"
            )

    @property
    def stored_end(self) -> int:
        """Most tokens that a row stores."""
        return math.ceil(self.kv_share * (self.prompt_len + self.output_len))

    @property
    def stored_prompt(self) -> int:
        """Tokens that a row stores behind its prompt."""
        return min(self.prompt_len, self.stored_end)

    def context(self, position: float) -> float:
        """Tokens that the decode of an output token attends to, by its number."""
        return min(self.prompt_len + position, self.stored_end)


@dataclass(frozen=True)
class OffloadMachine:
    """Memories in bytes, and rates per second: bytes of links and disks, operations of processors.

    Attributes:
        device_memory, host_memory, disk: that may be used.
        up: from the host to the device.
        down, down_kv: from the device to the host, activations, and keys and values of prompts.
        disk_read, disk_read_weights: keys, values and activations, and weights.
        disk_write, disk_write_kv: of decodes and activations, and keys and values of prompts.
        prefill_matrix, prefill_attention, decode_matrix, decode_attention: operations on the device.
        host_attention: operations on the host.
        memory_rate: bytes that the device reads of its own memory.
        host_fit: factors by which attention on the host loses with small batches and layers. With
            ``b = log2(64 / batch_size)`` and ``h = log2(4096 / hidden_size)``, each at least 0, it reaches
            ``max(0.1, 1 + f0 * b * h - f1 * b - f2 * h)`` of its rate.
        score_bytes: of a score that prompts store while they attend; 0 for attention in tiles.
        loads_first: whether a decode waits for what is loaded for it, as FlexGen's fit has it, instead of
            loading while it computes.
        flexgen_memory: whether memory is counted as FlexGen does: buffers for the share of a layer that
            moves, and keys and values by token. Otherwise it is what the engine of this package allocates.
    """

    device_memory: float
    host_memory: float
    disk: float
    up: float
    down: float
    down_kv: float
    disk_read: float
    disk_read_weights: float
    disk_write: float
    disk_write_kv: float
    prefill_matrix: float
    prefill_attention: float
    decode_matrix: float
    decode_attention: float
    host_attention: float
    memory_rate: float = math.inf
    host_fit: tuple[float, float, float] = (0.0, 0.0, 0.0)
    score_bytes: int = 0
    loads_first: bool = False
    flexgen_memory: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float) and not value > 0 and each.name not in ("host_memory", "disk"):
                raise ValueError(f"expected {each.name} above 0, got {value}")
        if self.host_memory < 0 or self.disk < 0:
            raise ValueError("expected host_memory and disk of 0 or more")

    def host_rate(self, batch_size: int, hidden_size: int) -> float:
        """Operations of attention on the host in a second."""
        rows, size = max(0.0, math.log2(64 / batch_size)), max(0.0, math.log2(4096 / hidden_size))
        both, by_rows, by_size = self.host_fit
        return self.host_attention * max(0.1, 1 + both * rows * size - by_rows * rows - by_size * size)

    def with_memory(self, name: str, more: float) -> OffloadMachine:
        """The same with so many bytes more of ``device_memory``, ``host_memory`` or ``disk``."""
        return replace(self, **{name: getattr(self, name) + more})


_GB = 1 << 30
FLEXGEN_T4 = OffloadMachine(
    device_memory=0.8 * 16 * _GB,
    host_memory=0.8 * 200 * _GB,
    disk=0.8 * 1500 * _GB,
    up=12.89 * _GB,
    down=4.82 * _GB,
    down_kv=0.97 * _GB,
    disk_read=0.473 * _GB,
    disk_read_weights=0.95 * 0.473 * _GB,
    disk_write=2.015 * _GB,
    disk_write_kv=0.746 * _GB,
    prefill_matrix=21.24e12,
    prefill_attention=9.97e12,
    decode_matrix=4.3e12,
    decode_attention=0.079e12,
    host_attention=0.0123e12,
    host_fit=(0.0168, 0.0328, 0.0621),
    score_bytes=2,
    loads_first=True,
    flexgen_memory=True,
)
"""The machine of FlexGen's measurements: an NVIDIA T4 and its host, with FlexGen's published fit, and 0.8 of
16 GiB on the device, 200 GiB on the host and 1,500 GiB of disk. It does not know the device's memory rate."""
T4 = replace(FLEXGEN_T4, memory_rate=320e9)
"""The same with the memory bandwidth that NVIDIA states for a T4, which bounds decodes of few rows."""


class Formula:
    """The cost of one size of batches.

    Args:
        host_attention: see ``Policy``.
    """

    def __init__(
        self,
        model: OffloadModel,
        work: OffloadWork,
        machine: OffloadMachine,
        batch_size: int,
        num_batches: int,
        host_attention: bool,
    ) -> None:
        if batch_size < 1 or num_batches < 1:
            raise ValueError(f"expected a batch of 1 row or more, got {batch_size} x {num_batches}")
        self.model, self.work, self.machine = model, work, machine
        self.batch_size, self.num_batches, self.host_attention = batch_size, num_batches, host_attention
        self.num_rows = batch_size * num_batches

    def prefill(self) -> dict[str, Form]:
        """Seconds of the prompts in a layer by resource."""
        model, work, machine, rows = self.model, self.work, self.machine, self.num_rows
        length = work.prompt_len
        act = rows * length * model.act_bytes
        # With the keys of the first output token, as FlexGen has it.
        kv = rows * (work.stored_prompt + 1) * model.kv_bytes
        weights = model.layer_bytes
        away = _form(activations_host=act, activations_disk=act)
        up = _form(weights_host=weights, weights_disk=weights) + away
        down = _form(kv_host=kv, kv_disk=kv) / machine.down_kv + away / machine.down
        read = _form(weights_disk=weights, activations_disk=act) / machine.disk_read
        write = _form(kv_disk=kv) / machine.disk_write_kv + _form(activations_disk=act) / machine.disk_write
        compute = rows * length * 2 * model.layer_params / machine.prefill_matrix
        compute += rows * length**2 * model.pair_ops / machine.prefill_attention
        return dict(zip(RESOURCES, (up / machine.up, down, read, write, _form(constant=compute))))

    def decode(self, position: float | None = None) -> dict[str, Form]:
        """Seconds of one output token of each row in a layer by resource.

        Args:
            position: number of the output token; None = the mean of all.
        """
        model, work, machine, rows = self.model, self.work, self.machine, self.num_rows
        context = work.context(work.output_len / 2 if position is None else position)
        act, kv = rows * model.act_bytes, rows * context * model.kv_bytes
        weights = model.layer_bytes
        away = _form(activations_host=act, activations_disk=act)
        up = _form(weights_host=weights, weights_disk=weights) + away
        read = _form(kv_disk=kv, activations_disk=act) / machine.disk_read
        read += _form(weights_disk=weights) / machine.disk_read_weights
        write = _form(kv_disk=rows * model.kv_bytes, activations_disk=act) / machine.disk_write
        pairs = rows * context * model.pair_ops
        matrix = max(
            rows * 2 * model.layer_params / machine.decode_matrix,
            self.num_batches * weights / machine.memory_rate,
        )
        here = max(pairs / machine.decode_attention, kv / machine.memory_rate)
        compute = _form(constant=matrix, kv_device=here)
        if self.host_attention:
            there = pairs / machine.host_rate(self.batch_size, model.hidden_size)
            compute += _form(kv_host=there, kv_disk=there)
            down = away
        else:
            moved = _form(kv_host=kv, kv_disk=kv)
            compute += _form(kv_host=here, kv_disk=here)
            up, down = up + moved, away + moved / max(context, 1.0)
        return dict(zip(RESOURCES, (up / machine.up, down / machine.down, read, write, compute)))

    def memory(
        self,
        num_buffers: int = 2,
        *,
        reads_disk: bool = False,
        has_tiles: bool = False,
        has_away: bool = False,
    ) -> dict[str, tuple[Form, ...]]:
        """Bytes at the peak of each memory, of the prompts' phase and of decodes.

        Args:
            num_buffers: layers that the device has room for beside those that lie there.
            reads_disk: whether layers of the disk are read to two buffers of the host, before they are copied
                to the device.
            has_tiles: whether keys and values of the host pass through tiles of the device.
            has_away: whether hidden states of some batches lie on the host while they wait.
        """
        if self.machine.flexgen_memory:
            return self._flexgen_memory()
        constants = num_buffers, has_tiles, has_away
        device = tuple(self._step(each, *constants) for each in (self.work.prompt_len, 1))
        layers, weights, kv = self.model.num_layers, self.model.layer_bytes, self._stored_bytes()
        acts = [self.num_rows * tokens * self.model.act_bytes for tokens in (self.work.prompt_len, 1)]
        staged = 2 * weights * reads_disk
        host = (
            _form(weights_host=weights * layers, kv_host=kv, activations_host=each, constant=staged)
            for each in acts
        )
        disk = _form(weights_disk=weights * layers, kv_disk=kv, activations_disk=acts[0])
        return {"device": device, "host": tuple(host), "disk": (disk,)}

    def _stored_bytes(self) -> float:
        """Bytes of all keys and values in whole blocks."""
        blocks = -(-self.work.stored_end // BLOCK_SIZE)
        return self.num_rows * blocks * BLOCK_SIZE * self.model.kv_bytes * self.model.num_layers

    def _step(self, num_tokens: int, num_buffers: int, has_tiles: bool, has_away: bool) -> Form:
        """Bytes of the device in a step of the engine with so many new tokens of each row.

        What is computed is that of one batch at a time, its hidden states included, as
        ``hpu_duo.startup.tables.StepSizes`` has it. All batches have rotary tables and logits, and those that
        wait on the device have hidden states, twice: the model keeps those in front of its first layer.
        Of those that wait on the host these stay, and two batches' are on their way. Padding has a block.
        """
        model = self.model
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        # Of the two matrices that a feed-forward network has here; those with a gate have three.
        between = 2 * 2 * model.intermediate_size
        attention = 2 * 2 * (queries + 2 * keys) + 4 * 4 * model.num_heads * (model.head_dim + 2)
        layer = num_tokens * (10 * model.hidden_size + max(between, attention))
        logits = num_tokens * 10 * model.hidden_size + 8 * model.vocab_size
        unit = BLOCK_SIZE * model.kv_bytes
        held = num_tokens * (4 * model.head_dim + _IDS_BYTES) + 2 * model.vocab_size
        return _form(
            constant=model.resident_bytes
            + num_buffers * model.layer_bytes
            + unit * model.num_layers
            + self.num_rows * held
            + self.batch_size * max(layer, logits)
            + has_tiles * self._tile_bytes(unit)
            + has_away * 2 * self.batch_size * num_tokens * model.act_bytes,
            weights_device=model.layer_bytes * model.num_layers,
            kv_device=self._stored_bytes(),
            activations_device=self.num_rows * num_tokens * 2 * model.act_bytes,
            activations_host=self.num_rows * num_tokens * model.act_bytes,
            activations_disk=self.num_rows * num_tokens * model.act_bytes,
        )

    def _tile_bytes(self, unit: float) -> float:
        """Bytes of the tiles in which blocks move to the device, as ``GroupAhead`` has them."""
        size, rows = max(1.0, FAR_TILE_BYTES // unit), -(-self.work.stored_end // BLOCK_SIZE)
        if self.num_batches == 1 or self.host_attention:
            return 2 * (size + 1) * unit
        number = 1.0 + self.batch_size
        if size < rows:
            number += self.batch_size * rows / size
        return number * (min(size, rows) + 1) * unit

    def _flexgen_memory(self) -> dict[str, tuple[Form, ...]]:
        model, work, rows, batch = self.model, self.work, self.num_rows, self.batch_size
        layers, weights, act = model.num_layers, model.layer_bytes, model.act_bytes
        prompt, stored, end = work.prompt_len, work.stored_prompt, work.stored_end
        context_bytes = batch * end * model.kv_bytes
        first_device = self._on_device(prompt)
        first_device += _form(
            constant=batch
            * (prompt * model.work_bytes + self.machine.score_bytes * model.num_heads * prompt**2)
        )
        # Attention on the device has a batch's keys and values of a layer twice: as they arrive, and joined.
        scores = batch * 2 * model.num_heads * end
        local = 2 * context_bytes + scores
        decode_device = self._on_device(1)
        decode_device += _form(constant=batch * (model.work_bytes - 4 * model.num_heads * model.head_dim))
        decode_device += _form(kv_device=local + batch * 4 * model.num_heads * model.head_dim)
        if not self.host_attention:
            decode_device += _form(kv_host=local, kv_disk=local)
        buffer = _form(weights_host=weights, weights_disk=weights)
        away = _form(activations_host=1.0, activations_disk=1.0)
        first_host = _form(
            weights_host=weights * layers,
            activations_host=rows * prompt * act,
            kv_host=rows * stored * model.kv_bytes * layers,
        )
        first_host += buffer + away * batch * prompt * act
        decode_host = _form(
            weights_host=weights * layers,
            activations_host=rows * act,
            kv_host=rows * end * model.kv_bytes * layers,
        )
        decode_host += _form(
            weights_disk=weights,
            activations_disk=2 * batch * act,
            kv_disk=2 * context_bytes,
            constant=(scores + batch * act) * self.host_attention,
        )
        disk = _form(
            weights_disk=weights * layers,
            activations_disk=rows * prompt * act,
            kv_disk=rows * end * model.kv_bytes * layers,
        )
        return {"device": (first_device, decode_device), "host": (first_host, decode_host), "disk": (disk,)}

    def _on_device(self, num_tokens: int) -> Form:
        """Bytes of what lies there, of two buffers for layers, and of a batch's activations."""
        model, weights = self.model, self.model.layer_bytes
        act = num_tokens * model.act_bytes
        away = self.batch_size * act
        return _form(
            constant=model.resident_bytes,
            weights_device=weights * model.num_layers,
            weights_host=2 * weights,
            weights_disk=2 * weights,
            activations_device=self.num_rows * act,
            activations_host=away,
            activations_disk=away,
            kv_device=self.num_rows * self.work.stored_end * model.kv_bytes * model.num_layers,
        )

    def rounds(self, is_prefill: bool, position: float | None = None) -> dict[str, Form]:
        """Seconds of a layer by what goes on at the same time; the longest counts.

        What prompts load comes from the disk and then from the host, and what they store goes both ways too.
        A machine that loads first has no decode that computes meanwhile.
        """
        up, down, read, write, compute = (self.prefill() if is_prefill else self.decode(position)).values()
        if is_prefill:
            return {UP: up + read, DOWN: down + write, COMPUTE: compute}
        if self.machine.loads_first:
            return dict(zip(RESOURCES[1:], (down + up, read + up, write + up, compute + up)))
        return dict(zip(RESOURCES, (up, down, read, write, compute)))

    def seconds(self, placement: Placement) -> tuple[float, float]:
        """Seconds of a layer for all prompts, and for one output token of each row."""
        shares = _shares(placement)
        prefill, decode = (
            max(float(form @ shares) for form in self.rounds(is_prefill).values())
            for is_prefill in (True, False)
        )
        return prefill, decode

    def throughput(self, placement: Placement) -> float:
        """Output tokens in a second, of all rows, prompts included."""
        prefill, decode = self.seconds(placement)
        num_outputs = self.work.output_len
        seconds = self.model.num_layers * (prefill + (num_outputs - 1) * decode)
        return self.num_rows * num_outputs / seconds

    def peak_bytes(self, placement: Placement) -> dict[str, float]:
        """Most bytes of the device, the host and the disk, where layers lie whole in one memory."""
        shares = _shares(placement)
        num_away = math.ceil((1 - placement.weights_device) * self.model.num_layers - 1e-6)
        num_buffers = max(buffer_numbers(num_away, NUM_AHEAD), default=-1) + 1
        memory = self.memory(
            num_buffers,
            reads_disk=placement.weights_disk * self.model.num_layers > 1e-6,
            has_tiles=placement.kv_device < 1,
            has_away=placement.activations_device < 1,
        )
        return {name: max(float(form @ shares) for form in forms) for name, forms in memory.items()}

    def limits(self) -> dict[str, float]:
        """Bytes that each memory has."""
        machine = self.machine
        return {"device": machine.device_memory, "host": machine.host_memory, "disk": machine.disk}

    def fits(self, placement: Placement) -> bool:
        """Whether each memory holds its peak."""
        limits = self.limits()
        return all(used <= limits[name] * (1 + 1e-9) for name, used in self.peak_bytes(placement).items())


_IDS_BYTES = 64
"""Bytes of a token's number, position and place in the stores."""
_INDEX = {name: index for index, name in enumerate((*Placement._fields, "constant"))}


def _form(**factors: float) -> Form:
    form = np.zeros(10)
    for name, factor in factors.items():
        form[_INDEX[name]] = factor
    return form


def _shares(placement: Placement) -> Form:
    return np.array([*placement, 1.0])

"""The kernels of this folder: operators ``torch.ops.hpu_duo_x86_v3``, prebuilt or built at their first use.

Decode rows, of a few query tokens each, attend to the units of a store: every visible key and value is read
once for a few query heads, in place; slots after the last one that some token of a row sees are not read, so
their content does not matter. Many queries multiply packed tiles. Scores, weights and sums are float32.
Queries are bfloat16 with a store of bfloat16, or float32 with one of bfloat16, float16 or float32.

Shapes: N rows of up to M tokens and T tails, K heads, H query heads of a row and head, those of each token
contiguous, X units of S slots, D head size; of prompts, S queries of G heads and T keys; V logits.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Literal

import torch

from bias_builders import Window
from kernels_ref.native import BuildError, Origin, Sources, Unit
from kernels_ref.partial import Partial

Instructions = Literal["best", "vectors", "tiles", "model", "avx2", "avx512"]
"""Instructions for products: the best for the work, or slow models for tests. Of bfloat16: AVX512-BF16, AMX,
or a model of AMX. Of float32: eight lanes of AVX2, sixteen of AVX512, or a model of eight."""

NUMBER_OF: dict[Instructions, int] = {
    "best": 0,
    "vectors": 1,
    "tiles": 2,
    "model": 3,
    "avx2": 4,
    "avx512": 5,
}
"""Instructions as operators take them; the order is that of ``torch_operators.h``."""

SWITCH = "HPU_DUO_X86_KERNELS"
"""Environment variable: 0 = compute by torch's operators; avx2 or avx512 = as on a CPU with AVX2, or with
AVX512 but not AVX512-BF16; 1 = the best of this CPU."""

_EIGHT_LANES = ("avx2", "fma", "f16c")
_SIXTEEN_LANES = (*_EIGHT_LANES, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_VECTORS = (*_SIXTEEN_LANES, "avx512bf16")
_TILES = ("amx-tile", "amx-bf16")
_BYTES_IN_TABLES = ("avx512vbmi",)
_LANES_OF = {"0": 0, "avx2": 8, "avx512": 16, "1": 16}
"""Most lanes of float32 by the value of the variable."""
_FLOAT_STORES = (torch.bfloat16, torch.float16, torch.float32)
_OPERATORS = ("operators.cpp", "operator.cpp")
"""Ends of the names of sources that register operators; they are compiled for any x86 CPU."""
_INTEGERS, _VNNI = "float_int8.cpp", ("avx512vnni",)
"""A source that is compiled once more for sixteen lanes, and the instruction set of it."""
_ONE_OF_BOTH = "no_pairs.cpp"
"""Stands for the sources of bfloat16 where the CPU does not run them."""
_Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_PAIRS, _LANES, _MAX_ROW_DIM, _MAX_DIM = 32, 16, 576, 256
"""Head sizes are multiples of the first two numbers, for rows and for tiles, and at most the other two."""
_lock = Lock()


def switch() -> str:
    """Value of ``HPU_DUO_X86_KERNELS``; 1 where it is not set.

    Raises:
        ValueError: the variable has another value than 0, 1, avx2 and avx512.
    """
    found = os.environ.get(SWITCH) or "1"
    if found not in _LANES_OF:
        raise ValueError(f"{SWITCH}: expected 0, 1, avx2 or avx512, got {found!r}")
    return found


def is_supported() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 in vectors, and ``HPU_DUO_X86_KERNELS`` permits it."""
    return switch() == "1" and torch.cpu._is_avx512_bf16_supported()


def lanes() -> tuple[int, ...]:
    """Numbers of float32 lanes in which this CPU computes here, the best one last; empty for none."""
    most, flags = _LANES_OF[switch()], cpu_flags()
    found = [
        number for number, needed in ((8, _EIGHT_LANES), (16, _SIXTEEN_LANES)) if flags.issuperset(needed)
    ]
    return tuple(number for number in found if number <= most)


def serves(store: torch.dtype, arithmetic: torch.dtype) -> bool:
    """Whether this CPU runs our kernels, once they are built, on weights, keys and values of a dtype.

    Args:
        store: dtype of weights, keys and values in memory.
        arithmetic: dtype of inputs and queries: bfloat16 with a store of bfloat16, or float32 with one of
            bfloat16, float16 or float32.
    """
    if arithmetic == torch.float32:
        return store in _FLOAT_STORES and bool(lanes())
    return arithmetic == store == torch.bfloat16 and is_supported()


LOSS = "decodes of a small model take 1.6 to 3.5 times as long with torch's operators in AVX2"
"""Gains of these kernels: of a Llama of 110M, 32 rows and one row in float32, see ``docs/cpu.md``."""


@cache
def cpu_flags() -> frozenset[str]:
    """The instruction sets of the first CPU as Linux names them; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def has_tiles() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 in tiles as well, and the system permits it."""
    return is_supported() and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


def variants(arithmetic: torch.dtype = torch.bfloat16) -> tuple[Instructions, ...]:
    """All instructions for products of this machine, if the operators can be built."""
    if arithmetic == torch.float32:
        names: dict[int, Instructions] = {8: "avx2", 16: "avx512"}
        return (*(names[number] for number in lanes()), "model")
    return ("vectors", "tiles", "model") if has_tiles() else ("vectors", "model")


def description(arithmetic: torch.dtype = torch.bfloat16) -> str:
    """Description of the kernels and their instructions, on a CPU that ``serves`` the arithmetic, and whether
    they are from a prebuilt library."""
    if arithmetic == torch.float32:
        found = f"{'AVX512' if 16 in lanes() else 'AVX2'}, float32"
    else:
        found = "AVX512-BF16 and AMX" if has_tiles() else "AVX512-BF16"
    return f"our kernels ({found}{', prebuilt' if _is_prebuilt(switch()) else ''})"


@cache
def _is_prebuilt(_: str) -> bool:
    return origin() == "prebuilt"


def origin() -> Origin | None:
    """Return the origin of the operators; None if they cannot be had for lack of a compiler."""
    return sources().origin()


def is_available(arithmetic: torch.dtype = torch.bfloat16, store: torch.dtype | None = None) -> bool:
    """Whether the operators are available; a constant for compiled code.

    False, with one warning, where they cannot be built; without one where the CPU is another one.

    Args:
        arithmetic: see ``serves``.
        store: None = ``arithmetic``.
    """
    with _lock:
        return _load(arithmetic, store)


# torch.compiler.assume_constant_result does this, and imports all of Dynamo first.
is_available._dynamo_marked_constant = True  # type: ignore[attr-defined]


def require(arithmetic: torch.dtype | None = torch.bfloat16) -> None:
    """Load the operators.

    Args:
        arithmetic: None = any.

    Raises:
        ValueError: they are not available.
    """
    if arithmetic not in (torch.bfloat16, torch.float32):
        arithmetic = torch.bfloat16 if is_supported() else torch.float32
    if not is_available(arithmetic):
        raise ValueError("expected a CPU and a compiler that this kernel can use; call fits() first")


@cache
def _load(arithmetic: torch.dtype, store: torch.dtype | None = None) -> bool:
    return serves(store or arithmetic, arithmetic) and _load_operators()


@cache
def _load_operators() -> bool:
    try:
        torch.ops.load_library(sources().provide()[0])
    except (BuildError, OSError) as error:
        warnings.warn(f"the model runs slower than it could on this CPU: {error}", stacklevel=2)
        return False
    torch.ops.hpu_duo_x86_v3.use.default(max(lanes(), default=0), is_supported())
    attention = (("attend_blocks", _triple), ("attend_rings", _triple), ("attend_held", _triple))
    for name, shapes in (("linear", _linear), *attention):
        torch.library.register_fake(f"hpu_duo_x86_v3::{name}", shapes)
    torch.library.register_fake("hpu_duo_x86_v3::attend_coded_blocks", _like_queries)
    torch.library.register_fake("hpu_duo_x86_v3::widen_codes", _widened)
    torch.library.register_fake("hpu_duo_x86_v3::attend_with_weights", _with_mass)
    torch.library.register_fake("hpu_duo_x86_v3::eviction_victims", _one_of_each)
    torch.library.register_fake("hpu_duo_x86_v3::column_sums", _sums)
    torch.library.register_fake("hpu_duo_x86_v3::place_of_largest", _places)
    return True


def sources() -> Sources:
    """The sources of this CPU's operators, and those of a prebuilt library if this CPU runs it."""
    has_bytes = "avx512vbmi" in cpu_flags()
    sets = (*_VECTORS, *(_BYTES_IN_TABLES if has_bytes else ()), *(_TILES if has_tiles() else ()))
    mine = _units(lanes(), sets if is_supported() else None)
    # Of the prebuilt library, a CPU may lack whole sets, and not a part of the last one.
    portable = portable_units() if lanes() and has_bytes >= is_supported() else ()
    return Sources("x86", mine, portable, OPTIONS)


OPTIONS = ("-O3", "-fopenmp")
"""For the compiler, of all sources."""


def portable_units() -> tuple[Unit, ...]:
    """The sources of a library for all CPUs with AVX2; what is for other instructions is chosen by ``lanes``,
    ``is_supported`` and ``has_tiles``."""
    return _units((8, 16), (*_VECTORS, *_BYTES_IN_TABLES, *_TILES))


def _units(numbers: Sequence[int], pairs: Sequence[str] | None) -> tuple[Unit, ...]:
    """Return sources: those of float32 once for each number of lanes and the model.

    Args:
        numbers: of lanes.
        pairs: instruction sets of the sources of bfloat16, or None for none.
    """
    folder, units = Path(__file__).parent, []
    for path in sorted(folder.glob("*.cpp")):
        if path.name.startswith("float"):
            # The model is for tests, and has the bits of the others if compilers fuse nothing on their own.
            needed = {0: ("-O0",), 8: _machine(_EIGHT_LANES), 16: _machine(_SIXTEEN_LANES)}
            units += [
                Unit(path, (f"-DHPU_DUO_LANES={n}", "-ffp-contract=off", *needed[n])) for n in (0, *numbers)
            ]
            if path.name == _INTEGERS and 16 in numbers:
                units.append(Unit(path, ("-DHPU_DUO_VNNI", *units[-1].options, *_machine(_VNNI))))
        elif path.name.endswith(_OPERATORS):
            units.append(Unit(path))
        elif (pairs is None) == (path.name == _ONE_OF_BOTH):
            units.append(Unit(path, _machine(pairs or ())))
    return tuple(units)


def _machine(instruction_sets: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"-m{name}" for name in instruction_sets)


def _sums(q: torch.Tensor, k: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty(k.shape[1], k.shape[0], dtype=torch.float32)


def _widened(
    codes: torch.Tensor, meta: object, unit: torch.Tensor, dim: int, dtype: torch.dtype, *_: object
) -> torch.Tensor:
    return codes.new_empty(unit.shape[0], *codes.shape[1:3], dim, dtype=dtype)


def _places(rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[:1], dtype=torch.int32)


def _one_of_each(_: object, position: torch.Tensor, is_protected: object) -> torch.Tensor:
    return position.new_empty(position.shape[:2])


def _with_mass(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    return *_triple(q, k, v), q.new_empty(*q.shape[:2], k.shape[2], dtype=torch.float32)


def _linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: object,
    out_features: int,
    live: object,
    instructions: int = 0,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _like_queries(q: torch.Tensor, *_: object) -> _Triple:
    return _triple(q, q, q)


def _triple(q: torch.Tensor, _: object, v: torch.Tensor, *__: object) -> _Triple:
    attn = q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float32)
    return attn, attn.new_empty(attn.shape[:-1]), attn.new_empty(attn.shape[:-1])


def fits_rows(q_NKHD: torch.Tensor, k_XKSD: torch.Tensor, v_XKSD: torch.Tensor | None = None) -> bool:
    """Whether these queries and keys of rows are supported on this machine; a constant for compiled code.

    Args:
        v_XKSD: values, which may have another size; None = that of keys.
    """
    dim, value_dim = q_NKHD.shape[3], (q_NKHD if v_XKSD is None else v_XKSD).shape[3]
    is_possible = q_NKHD.device.type == "cpu" and dim % _PAIRS == 0 == value_dim % _PAIRS
    is_possible = is_possible and max(dim, value_dim) <= _MAX_ROW_DIM
    return is_possible and is_available(q_NKHD.dtype, k_XKSD.dtype)


def attend_blocks(
    q_NKHD: torch.Tensor,
    k_XKSD: torch.Tensor,
    v_XKSD: torch.Tensor,
    owner: torch.Tensor,
    tail_block: torch.Tensor,
    tail_visible: torch.Tensor,
) -> Partial:
    """Scaled queries over whole units that their rows own, and the leading slots of a few more.

    Args:
        owner: which row sees all of unit ``x``, int32 ``[<= X]``; numbers that are no row = none.
        tail_block: further units of each row, int32 ``[N, T]``.
        tail_visible: how many of their slots each token sees, int32 ``[N, T, M]``.

    Raises:
        ValueError: stores that do not go with the queries.
    """
    operator = torch.ops.hpu_duo_x86_v3.attend_blocks.default
    return Partial(*operator(q_NKHD, k_XKSD, v_XKSD, owner, tail_block, tail_visible))


def attend_rings(
    q_NKHD: torch.Tensor, k_XKSD: torch.Tensor, v_XKSD: torch.Tensor, visible: torch.Tensor
) -> Partial:
    """Scaled queries over the leading slots of a unit each.

    Args:
        visible: slots of unit ``n`` that each token of row ``n`` sees, int32 ``[N, 1, M]``.

    Raises:
        ValueError: as for ``attend_blocks``.
    """
    return Partial(*torch.ops.hpu_duo_x86_v3.attend_rings.default(q_NKHD, k_XKSD, v_XKSD, visible))


def attend_with_weights(
    q_NKHD: torch.Tensor,
    k_XKSD: torch.Tensor,
    v_XKSD: torch.Tensor,
    visible: torch.Tensor,
    sinks_KH: torch.Tensor | None,
) -> tuple[Partial, torch.Tensor]:
    """Scaled queries of one token a row over the leading slots of a unit each, with the weight of each slot.

    Args:
        visible: slots of unit ``n`` that row ``n`` sees, int32 ``[N, 1, 1]``.
        sinks_KH: logits that count in the weights, or None; the partial is without them.

    Returns:
        The partial, and the weights of each slot summed over query heads, float32 ``[N, K, S]``.

    Raises:
        ValueError: as for ``attend_blocks``.
    """
    operator = torch.ops.hpu_duo_x86_v3.attend_with_weights.default
    *partial, mass = operator(q_NKHD, k_XKSD, v_XKSD, visible, sinks_KH)
    return Partial(*partial), mass


def attend_held(
    q_NKHD: torch.Tensor,
    k_XKSD: torch.Tensor,
    v_XKSD: torch.Tensor,
    position: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    sink: int,
) -> Partial:
    """Scaled queries over the slots of a unit each whose positions lie in an interval; see ``Held``.

    Slots before the last used one must be finite.

    Args:
        position: positions in the slots of unit ``n``, int32 ``[N, K, S]`` or ``[N, 1, S]``.
        begin, end: what each token sees, int32 ``[N, M]``.
        sink: positions that every token sees.

    Raises:
        ValueError: as for ``attend_blocks``.
    """
    operator = torch.ops.hpu_duo_x86_v3.attend_held.default
    return Partial(*operator(q_NKHD, k_XKSD, v_XKSD, position, begin, end, sink))


def fits_tiles(q_SKGD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor | None = None) -> bool:
    """Whether ``attend`` supports these queries and keys on this machine.

    Args:
        v_TKD: values, which must have the size of keys; None = they have.
    """
    dim = q_SKGD.shape[3]
    return (
        q_SKGD.device.type == "cpu"
        and dim % _LANES == 0
        and dim <= _MAX_DIM
        and k_TKD.shape[2] == dim
        and (v_TKD is None or v_TKD.shape[2] == dim)
        and is_available(q_SKGD.dtype, k_TKD.dtype)
    )


def attend(
    total: Partial,
    q_SKGD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    *,
    is_causal: bool = False,
    window: Window | None = None,
    instructions: Instructions = "best",
) -> None:
    """Merge attention of scaled queries over some keys into ``total``, in place.

    Args:
        total: partial of the queries so far, contiguous ``[S, K, G, D]`` and ``[S, K, G]``.
        is_causal: query ``s`` sees keys ``0..s`` only; there are as many keys as queries.
        window: with ``is_causal``, only the first ``sink`` and the last ``recent`` of those.

    Raises:
        ValueError: queries, keys and flags that do not go together, or no such kernel here.
    """
    num_queries, num_kv, _, dim = q_SKGD.shape
    num_keys = k_TKD.shape[0]
    if k_TKD.shape != (num_keys, num_kv, dim) or v_TKD.shape != k_TKD.shape:
        raise ValueError(
            f"expected keys and values [T, {num_kv}, {dim}], got {[*k_TKD.shape]} and {[*v_TKD.shape]}"
        )
    if (is_causal and num_keys != num_queries) or (window is not None and not is_causal):
        raise ValueError(
            f"expected a window only with is_causal, and then as many keys as queries, "
            f"got {window=}, {is_causal=}, {num_queries} queries and {num_keys} keys"
        )
    if not all(part.is_contiguous() for part in total):
        raise ValueError("expected a contiguous partial to merge into")
    require(q_SKGD.dtype)
    sink, recent = window or (0, 0)
    torch.ops.hpu_duo_x86_v3.attend.default(
        *total, q_SKGD, k_TKD, v_TKD, is_causal, sink, recent, NUMBER_OF[instructions]
    )


def column_sums(
    q_SKGD: torch.Tensor,
    k_TKD: torch.Tensor,
    lse_SKG: torch.Tensor,
    *,
    offset: int | None = None,
    instructions: Instructions = "best",
) -> torch.Tensor:
    """Weights that scaled queries put on each key, float32 ``[K, T]``, summed over queries and query heads.

    Args:
        lse_SKG: log-sum-exp of the scores of each query, float32.
        offset: query ``s`` sees keys up to ``s + offset``; None = all keys.

    Raises:
        ValueError: tensors that do not go together, or no such kernel here.
    """
    require(q_SKGD.dtype)
    return torch.ops.hpu_duo_x86_v3.column_sums.default(
        q_SKGD, k_TKD, lse_SKG, offset, NUMBER_OF[instructions]
    )


def fits_slots(position_NKC: torch.Tensor) -> bool:
    """Whether the kernel can read the slots; a constant for compiled code."""
    return position_NKC.device.type == "cpu" and is_available(torch.float32)


def eviction_victims(
    score_NKC: torch.Tensor | None, position_NKC: torch.Tensor, is_protected: torch.Tensor | None
) -> torch.Tensor:
    """See ``kernels_ref.groups.budget_slots``.

    Raises:
        ValueError: shapes that differ, other dtypes, or no such kernel here.
    """
    require(torch.float32)
    return torch.ops.hpu_duo_x86_v3.eviction_victims.default(score_NKC, position_NKC, is_protected)


def fits_logits(rows_NV: torch.Tensor) -> bool:
    """Whether these are rows that the kernel reads, here."""
    return rows_NV.device.type == "cpu" and is_available(rows_NV.dtype)


def place_of_largest(rows_NV: torch.Tensor) -> torch.Tensor:
    """The place of the first of the largest items of each row, int32 ``[N]``.

    An item that is not a number is larger than any, as for ``torch.argmax``.

    Raises:
        ValueError: there are no two dimensions or no items, the dtype is another one, or there is no such
            kernel here.
    """
    require(rows_NV.dtype)
    return torch.ops.hpu_duo_x86_v3.place_of_largest.default(rows_NV)

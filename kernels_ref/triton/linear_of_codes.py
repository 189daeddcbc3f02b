"""Linear layers of 8-bit and 4-bit codes, which stay codes in memory.

Codes become numbers in registers and meet inputs; sums in float32 of each group of inputs are multiplied by
its scale. Inputs may be codes too: codes of the same kind are multiplied as integers or as 8-bit
floats. For many plain rows the weight is decoded first, and torch multiplies.

Shapes: Q rows, N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.softmax import FP8, INT4, INT8, NATIVE_FP8, numbers_of, product

TILE_BYTES = 2048
"""Bytes of an output's codes that the product of one row reads at a time."""
MOST_ROWS = 64
"""Plain rows up to which codes are read for each tile of rows."""
_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: a float32 below 2^22 that is added to it, and from which it is subtracted, is an integer."""
LEAST_SIZE = tl.constexpr(2.0**-100)
"""Least size of the largest input of a group, so that zeros have a scale."""


@triton.jit
def _from_bytes(codes: tl.tensor, base: tl.tensor) -> tl.tensor:
    """Unsigned bytes less ``base`` in float32: bits of 2^23 plus a byte, a fast way to convert integers."""
    bits = codes.to(tl.uint32) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - (base + 8388608.0)


@triton.jit
def _wide(codes: tl.tensor, zero: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Codes of a byte less their zero points, which broadcast, in float32; of fp8 see ``numbers_of``."""
    if KIND == INT8:
        if codes.dtype == tl.int8:
            numbers = _from_bytes(codes.to(tl.uint8, bitcast=True) ^ 0x80, zero + 128.0)
        else:
            numbers = _from_bytes(codes, zero)
    else:
        numbers = numbers_of(codes, tl.zeros([1], dtype=tl.float32), KIND) - zero
    return numbers


@triton.jit
def _multiply(
    x: tl.tensor,
    codes: tl.tensor,
    zero: tl.tensor,
    acc: tl.tensor,
    KIND: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
) -> tl.tensor:
    """``acc + x @ (codes - zero)^T``, without scales; ``x`` is ``[M, B]``, 4-bit codes ``[N, B / 2]``."""
    if IS_ROUNDED and KIND == INT8:
        acc = tl.dot(x, tl.trans(codes), acc, out_dtype=tl.int32)
    elif IS_ROUNDED and KIND == NATIVE_FP8:
        left, right = x.to(tl.float8e4nv, bitcast=True), codes.to(tl.float8e4nv, bitcast=True)
        # Sums of 8-bit floats are shortened to 14 bits: one tile at most.
        acc = tl.dot(left, tl.trans(right), acc, max_num_imprecise_acc=x.shape[1])
    elif IS_ROUNDED:
        like = tl.zeros([1], dtype=tl.float16)
        acc = product(numbers_of(x, like, KIND), tl.trans(numbers_of(codes, like, KIND)), acc)
    elif KIND == INT4:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        low, high = _from_bytes(codes & 15, zero[:, None]), _from_bytes(codes >> 4, zero[:, None])
        acc = product(even, tl.trans(low.to(x.dtype)), acc)
        acc = product(odd, tl.trans(high.to(x.dtype)), acc)
    else:
        acc = product(x, tl.trans(_wide(codes, zero[:, None], KIND).to(x.dtype)), acc)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def linear_of_codes_kernel(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    X_INPUTS: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    RANGE: tl.constexpr,
) -> None:
    """Grid ``(tiles of M rows, tiles of BN outputs, ranges of RANGE inputs)``, each with a result of its own.

    ``OUTPUTS`` and ``INPUTS`` share a scale of the weight, ``X_INPUTS`` of a row share one of inputs that are
    codes. One group of all inputs has the scale behind the last product; else ``BK`` divides groups.
    """
    row = tl.program_id(0) * M + tl.arange(0, M)
    output = tl.program_id(1) * BN + tl.arange(0, BN)
    is_row, is_output = row < num_rows, output < N
    row = row.to(tl.int64)
    WIDTH: tl.constexpr = (K + 1) // 2 if KIND == INT4 else K
    COLUMNS: tl.constexpr = BK // 2 if KIND == INT4 else BK
    GROUPS: tl.constexpr = (K + INPUTS - 1) // INPUTS
    X_GROUPS: tl.constexpr = (K + X_INPUTS - 1) // X_INPUTS
    IS_GROUPED: tl.constexpr = GROUPS > 1 or X_GROUPS > 1
    UNIT: tl.constexpr = 256.0 * 256.0 if KIND == FP8 and IS_ROUNDED else (256.0 if KIND == FP8 else 1.0)
    SUM: tl.constexpr = tl.int32 if IS_ROUNDED and KIND == INT8 else tl.float32
    table = (output // OUTPUTS) * GROUPS
    step, column = tl.arange(0, BK), tl.arange(0, COLUMNS)
    x_place = row[:, None] * K + step[None, :]
    place = output.to(tl.int64)[:, None] * WIDTH + column[None, :]
    acc = tl.zeros([M, BN], dtype=SUM)
    total = tl.zeros([M, BN], dtype=tl.float32)
    zero = tl.zeros([BN], dtype=tl.float32)
    if HAS_ZEROS and GROUPS == 1:
        zero = tl.load(zero_ptr + table, mask=is_output, other=0).to(tl.float32)
    split = tl.program_id(2)
    first = split * RANGE
    for start in range(first, tl.minimum(first + RANGE, K), BK):
        if K % BK == 0:
            x = tl.load(x_ptr + x_place + start, mask=is_row[:, None], other=0)
            codes = tl.load(codes_ptr + place + start * COLUMNS // BK, mask=is_output[:, None], other=0)
        else:
            x = tl.load(x_ptr + x_place + start, mask=is_row[:, None] & (start + step < K)[None, :], other=0)
            is_code = is_output[:, None] & (start * COLUMNS // BK + column < WIDTH)[None, :]
            codes = tl.load(codes_ptr + place + start * COLUMNS // BK, mask=is_code, other=0)
        if IS_GROUPED:
            group = start // INPUTS
            scale = tl.load(scale_ptr + table + group, mask=is_output, other=0).to(tl.float32)
            if HAS_ZEROS:
                zero = tl.load(zero_ptr + table + group, mask=is_output, other=0).to(tl.float32)
            nothing = tl.zeros([M, BN], dtype=SUM)
            part = _multiply(x, codes, zero, nothing, KIND, IS_ROUNDED).to(tl.float32) * scale[None, :]
            if X_GROUPS > 1:
                x_scale = tl.load(x_scale_ptr + row * X_GROUPS + start // X_INPUTS, mask=is_row, other=0)
                part = part * x_scale[:, None]
            total += part
        else:
            acc = _multiply(x, codes, zero, acc, KIND, IS_ROUNDED)
    if not IS_GROUPED:
        scale = tl.load(scale_ptr + table, mask=is_output, other=0).to(tl.float32)
        total = acc.to(tl.float32) * scale[None, :]
    if IS_ROUNDED and X_GROUPS == 1:
        total = total * tl.load(x_scale_ptr + row, mask=is_row, other=0)[:, None]
    total = total * UNIT
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=is_output, other=0).to(tl.float32)[None, :]
    inside = is_row[:, None] & is_output[None, :]
    place = (split * num_rows + row)[:, None] * N + output[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def row_of_codes_kernel(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    X_INPUTS: tl.constexpr,
    BN: tl.constexpr,
    GROUPS_AT_A_TIME: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """Grid ``(tiles of BN outputs,)``: the product of one row with 8-bit codes, without matrix units.

    Arguments as of ``linear_of_codes_kernel``. ``SPAN`` inputs, of so many groups at a time, share a scale.
    """
    GROUPS: tl.constexpr = (K + INPUTS - 1) // INPUTS
    X_GROUPS: tl.constexpr = (K + X_INPUTS - 1) // X_INPUTS
    UNIT: tl.constexpr = 256.0 * 256.0 if KIND == FP8 and IS_ROUNDED else (256.0 if KIND == FP8 else 1.0)
    output = tl.program_id(0) * BN + tl.arange(0, BN)
    is_output = output < N
    group, step = tl.arange(0, GROUPS_AT_A_TIME), tl.arange(0, SPAN)
    table = (output // OUTPUTS) * GROUPS
    line = output.to(tl.int64)[:, None, None] * K
    acc = tl.zeros([BN, GROUPS_AT_A_TIME, SPAN], dtype=tl.float32)
    for start in range(0, K, GROUPS_AT_A_TIME * SPAN):
        first = start + group * SPAN
        column = first[:, None] + step[None, :]
        is_code = is_output[:, None, None] & (column < K)[None, :, :]
        codes = tl.load(codes_ptr + line + column[None, :, :], mask=is_code, other=0)
        is_group = is_output[:, None] & (first < K)[None, :]
        entry = table[:, None] + (first // INPUTS)[None, :]
        zero = tl.zeros([BN, GROUPS_AT_A_TIME], dtype=tl.float32)
        if HAS_ZEROS:
            zero = tl.load(zero_ptr + entry, mask=is_group, other=0).to(tl.float32)
        x = tl.load(x_ptr + column, mask=column < K, other=0)
        if IS_ROUNDED:
            x = numbers_of(x, tl.zeros([1], dtype=tl.float32), KIND)
        part = x.to(tl.float32)[None, :, :] * _wide(codes, zero[:, :, None], KIND)
        if GROUPS > 1:
            part *= tl.load(scale_ptr + entry, mask=is_group, other=0).to(tl.float32)[:, :, None]
        if X_GROUPS > 1:
            of_x = tl.load(x_scale_ptr + first // X_INPUTS, mask=first < K, other=0)
            part *= of_x[None, :, None]
        acc += part
    total = tl.sum(tl.sum(acc, 2), 1) * UNIT
    if GROUPS == 1:
        total *= tl.load(scale_ptr + table, mask=is_output, other=0).to(tl.float32)
    if IS_ROUNDED and X_GROUPS == 1:
        total *= tl.load(x_scale_ptr)
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=is_output, other=0).to(tl.float32)
    tl.store(out_ptr + output, total.to(out_ptr.dtype.element_ty), mask=is_output)


@triton.jit
def widen_codes_kernel(
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """Grid ``(tiles of BN outputs, tiles of BK inputs)``: the plain weight, rounded once."""
    WIDTH: tl.constexpr = (K + 1) // 2 if KIND == INT4 else K
    COLUMNS: tl.constexpr = BK // 2 if KIND == INT4 else BK
    GROUPS: tl.constexpr = (K + INPUTS - 1) // INPUTS
    UNIT: tl.constexpr = 256.0 if KIND == FP8 else 1.0
    output = tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.program_id(1) * BK + tl.arange(0, BK)
    is_output = output < N
    is_code = is_output[:, None] & (column < WIDTH)[None, :]
    codes = tl.load(codes_ptr + output.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=is_code, other=0)
    inside = is_output[:, None] & (step < K)[None, :]
    place = ((output // OUTPUTS) * GROUPS)[:, None] + (step // INPUTS)[None, :]
    zero = tl.zeros([BN, BK], dtype=tl.float32)
    if HAS_ZEROS:
        zero = tl.load(zero_ptr + place, mask=inside, other=0).to(tl.float32)
    if KIND == INT4:
        numbers = _from_bytes(tl.interleave(codes & 15, codes >> 4), zero)
    else:
        numbers = _wide(codes, zero, KIND)
    numbers *= tl.load(scale_ptr + place, mask=inside, other=0).to(tl.float32) * UNIT
    target = output.to(tl.int64)[:, None] * K + step[None, :]
    tl.store(out_ptr + target, numbers.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _to_fp8(values: tl.tensor) -> tl.tensor:
    """Values of at most 448 as bits of e4m3, rounded to the nearest, half a step to even.

    Rounded in float32 first, since not all devices and not the interpreter round so.
    """
    exponent = tl.maximum((values.to(tl.int32, bitcast=True) >> 23) & 0xFF, 127 - 6) - 3
    step = (exponent << 23).to(tl.float32, bitcast=True)
    per_step = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    steps = tl.abs(values) * per_step + _ROUND - _ROUND
    size = steps * step
    # The bits of a float16 of 2^-8 times the size: the same with four more bits of exponent and mantissa.
    half = (size * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True)
    sign = (values.to(tl.int32, bitcast=True) >> 31) & 0x80
    return ((half >> 7).to(tl.int32) | sign).to(tl.uint8)


@triton.jit
def round_rows_kernel(
    x_ptr: tl.tensor,
    given_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    INPUTS: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """Grid ``(groups of INPUTS of all rows,)``: codes, and the scale of each group, NaN if an input is."""
    MOST: tl.constexpr = 448.0 if IS_FP8 else 127.0
    LEAST: tl.constexpr = -448.0 if IS_FP8 else -128.0
    base = tl.program_id(0).to(tl.int64) * INPUTS
    column = tl.arange(0, B)
    most = tl.full([B], LEAST_SIZE, dtype=tl.float32)
    nothing = tl.zeros([B], dtype=tl.float32)
    for start in range(0, INPUTS, B):
        x = tl.load(x_ptr + base + start + column, mask=start + column < INPUTS, other=0).to(tl.float32)
        most = tl.maximum(most, tl.abs(x))
        # A constant scale clips infinities.
        nothing += tl.where(x != x, x, 0.0) if IS_GIVEN else x * 0.0
    if IS_GIVEN:
        scale = tl.load(given_ptr).to(tl.float32)
    else:
        scale = tl.math.div_rn(tl.max(most, 0), tl.full([], MOST, dtype=tl.float32))
    tl.store(scale_ptr + tl.program_id(0), scale + tl.sum(nothing, 0))
    for start in range(0, INPUTS, B):
        inside = start + column < INPUTS
        x = tl.load(x_ptr + base + start + column, mask=inside, other=0).to(tl.float32)
        values = tl.math.div_rn(x, tl.full([B], 0.0, dtype=tl.float32) + scale)
        values = tl.minimum(tl.maximum(values, LEAST), MOST)
        if IS_FP8:
            codes = _to_fp8(values)
        else:
            codes = (values + _ROUND - _ROUND).to(tl.int8)
        tl.store(codes_ptr + base + start + column, codes, mask=inside)


def _tile_of_one_row(inputs: int, num_inputs: int) -> dict[str, int | bool]:
    """Sizes of a tile of one row: all of a program's loads of it are under way at once."""
    is_grouped = inputs < num_inputs
    # What shares a scale in a tile is of one group.
    span = min(TILE_BYTES, inputs & -inputs if is_grouped else launch.next_power_of_two(inputs))
    sizes = {"GROUPS_AT_A_TIME": TILE_BYTES // span if is_grouped else 1, "SPAN": span}
    return {"BN": 4, **sizes, **launch.MERGE.options}


def _tiles(num_rows: int, inputs: int, x: torch.Tensor, is_rounded: bool) -> dict[str, int | bool]:
    """Sizes of a tile: few rows are bound by reading, many by products."""
    rows = min(128 if is_rounded else MOST_ROWS, max(launch.MIN_TILE, launch.next_power_of_two(num_rows)))
    outputs = max(32, rows)
    most = 32 if x.dtype == torch.float32 and not is_rounded else 128
    # A scale is that of a whole tile of inputs.
    columns = min(most, inputs & -inputs) if inputs < x.shape[-1] else most
    tiles = launch.Launch(rows, columns, num_warps=8 if rows > 64 else 4, num_stages=5 if rows <= 32 else 3)
    return {"M": rows, "BN": outputs, "BK": columns, **tiles.options}


def _ranges(num_tiles: int, num_inputs: int, columns: int, limits: launch.DeviceLimits) -> tuple[int, int]:
    """Number of ranges of inputs, and inputs of one: four programs for each processor, if inputs suffice."""
    most = launch.num_tiles(num_inputs, 4 * columns)
    wanted = launch.num_splits(num_tiles // 2, most, limits)
    size = launch.num_tiles(launch.num_tiles(num_inputs, wanted), columns) * columns
    return launch.num_tiles(num_inputs, size), size


def _rounded(
    x_QK: torch.Tensor, kind: int, inputs: int, given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_inputs = x_QK.shape
    codes = torch.empty(
        x_QK.shape, dtype=torch.int8 if kind == INT8.value else torch.uint8, device=x_QK.device
    )
    scales = x_QK.new_empty(num_rows, num_inputs // inputs, dtype=torch.float32)
    round_rows_kernel[(scales.numel(),)](
        *(x_QK, scales if given is None else given, codes, scales),
        INPUTS=inputs,
        IS_FP8=kind != INT8.value,
        IS_GIVEN=given is not None,
        B=min(1024, launch.next_power_of_two(inputs)),
        **launch.MERGE.options,
    )
    return codes, scales


def linear_of_codes(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    num_outputs: int,
    outputs: int,
    inputs: int,
    kind: int,
    rounded_inputs: int,
) -> torch.Tensor:
    """Launch the kernels; see ``kernels_ref.triton.operators.linear_of_codes``."""
    kind, num_inputs = launch.kind_on(kind, x.device), x.shape[-1]
    x_QK = x.reshape(-1, num_inputs).contiguous()
    num_rows = len(x_QK)
    weight = {
        **{"N": num_outputs, "K": num_inputs, "OUTPUTS": outputs, "INPUTS": inputs, "KIND": kind},
        "HAS_ZEROS": zeros is not None,
    }
    tables = codes, scales, codes if zeros is None else zeros
    if rounded_inputs == 0 and num_rows > MOST_ROWS:
        plain = x.new_empty(num_outputs, num_inputs)
        tile = {"BN": 16, "BK": 256}
        grid = (launch.num_tiles(num_outputs, tile["BN"]), launch.num_tiles(num_inputs, tile["BK"]))
        widen_codes_kernel[grid](*tables, plain, **weight, **tile, **launch.MERGE.options)
        return torch.nn.functional.linear(x, plain, bias)
    out = x.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return out.view(*x.shape[:-1], num_outputs)
    rows, x_scales = x_QK, scales
    if rounded_inputs:
        rows, x_scales = _rounded(x_QK, kind, rounded_inputs, input_scale)
    constants = {
        **weight,
        "IS_ROUNDED": rounded_inputs > 0,
        "X_INPUTS": rounded_inputs or num_inputs,
        "HAS_BIAS": bias is not None,
    }
    group = math.gcd(inputs, rounded_inputs or inputs)
    pointers = (rows, x_scales, *tables, out if bias is None else bias)
    # Half bytes are unpacked faster between products of matrix units.
    if num_rows == 1 and kind != INT4.value:
        sizes = _tile_of_one_row(group, num_inputs)
        num_programs = launch.num_tiles(num_outputs, sizes["BN"])
        row_of_codes_kernel[(num_programs,)](*pointers, out, **constants, **sizes)
        return out.view(*x.shape[:-1], num_outputs)
    sizes = _tiles(num_rows, group, x_QK, rounded_inputs > 0)
    grid = (launch.num_tiles(num_rows, sizes["M"]), launch.num_tiles(num_outputs, sizes["BN"]))
    ranges, size = _ranges(math.prod(grid), num_inputs, sizes["BK"], launch.device_limits(x.device))
    if ranges == 1:
        linear_of_codes_kernel[(*grid, 1)](*pointers, out, num_rows, **constants, **sizes, RANGE=size)
        return out.view(*x.shape[:-1], num_outputs)
    parts = x.new_empty(ranges, num_rows, num_outputs, dtype=torch.float32)
    constants["HAS_BIAS"] = False
    linear_of_codes_kernel[(*grid, ranges)](*pointers, parts, num_rows, **constants, **sizes, RANGE=size)
    total = parts.sum(dim=0) if bias is None else parts.sum(dim=0) + bias
    return total.to(x.dtype).view(*x.shape[:-1], num_outputs)

"""Exact order statistics of a whole BF16 or FP16 tensor on one GPU, mostly in one reading of it.

The histogram of a sample of 2¹⁸ values brackets each rank to a few of the 2¹⁶ possible values. One reading counts the
values at or above seven thresholds from there on, which decides the rank, or leaves a bracket at most a third as wide
for another reading, and that one a quarter. Whatever the sample says, the answer is that of counting: a rank that no
reading decides is bisected.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from fp4jax import outliers
from fp4jax.kernels import quantile_device as device
from fp4jax.kernels.device import interpreting, triton_call
from fp4jax.typing import Array, AxisName

DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
SAMPLES = 2**18
SORTED = 2**13  # values up to which sorting is as good
_SIGMAS = 5  # half width of a bracket, in standard deviations of the rank of a sampled value: 1 in 2 million is missed
_ROWS, _COLS, _UNROLL = 4, 128, 4  # of a tile; tiles an iteration
_GROUPS = (4, 2, 1)  # tiles below each other that a program may read
_FLAT = 2048  # columns that a tensor of any shape is given


class RowExtremes(NamedTuple):
    """The largest value of each row of a matrix, and the negated smallest one; float32 [m], NaN if the row has any."""

    top: Array
    bottom: Array


def order_statistics(x: Array, ranks: tuple[int, int], *, names: tuple[AxisName, ...] = ()) -> tuple[Array, Array]:
    """The two values that would stand at ``ranks`` were all of ``x`` sorted; equal to ``jnp.sort``.

    The kernels read 16-bit values of one device. Others are counted by the reference, a reading a bit
    (``fp4jax.outliers.order_statistics``). A zero of 16 bits comes back as +0, and NaN as one of positive sign.

    Args:
        x: bfloat16, float16 or float32, any shape but empty. NaN sorts last.
        ranks: static positions in the sorted order.
        names: manual mesh axes over which the values are split, inside a ``jax.shard_map(check_vma=False)``; ranks are
            those among all of them.

    Returns:
        Two scalars of the dtype of ``x``.

    Raises:
        TypeError: for another dtype.
        ValueError: for a rank out of range, or 2³¹ values or more.
    """
    return order_statistics_and_extremes(x, ranks, names=names, extremes=False)[0]


def order_statistics_and_extremes(
    x: Array, ranks: tuple[int, int], *, names: tuple[AxisName, ...] = (), extremes: bool = True
) -> tuple[tuple[Array, Array], RowExtremes | None]:
    """``order_statistics``, and of a matrix the extremes of its rows, where the reading that counts finds them too.

    Returns:
        Two scalars, and extremes or None: of what is no matrix, is 32 bits wide or small, or whose sides are no
        multiples of 16 and 128.
    """
    x = jnp.asarray(x)
    n = math.prod(x.shape) * math.prod(lax.axis_size(name) for name in names)
    if x.dtype not in DTYPES:
        raise TypeError(f"x has dtype {x.dtype}; the exact quantile takes bfloat16, float16 or float32")
    if len(ranks) != 2 or not all(0 <= r < n for r in ranks):
        raise ValueError(f"ranks={ranks} must be two positions in the {n} values of x")
    if n >= 2**31:
        raise ValueError(f"an exact quantile of {n} values overflows its int32 counts; use OCC(quantile='sampled')")
    if names or x.dtype == np.float32:
        first, second = outliers.order_statistics(x.reshape(-1), ranks, (-1,), names)
        return (first.reshape(()).astype(x.dtype), second.reshape(()).astype(x.dtype)), None
    if n <= SORTED:
        keys = jnp.sort(device.key_of(x.reshape(-1)))
        return (device.float_of(keys[ranks[0]], x.dtype), device.float_of(keys[ranks[1]], x.dtype)), None
    needs = tuple(n - rank for rank in ranks)
    survey = survey_of(x.shape, needs, extremes=extremes)
    matrix = x if survey is not None else _flattened(x)
    padding = matrix.size - n
    if survey is None:
        survey = survey_of(matrix.shape, needs, extremes=False)
        assert survey is not None
    readings = _readings(ranks, n, jnp.finfo(x.dtype).nmant)
    bracket, work = _brackets(matrix.reshape(-1), n, ranks, readings)
    found = []
    for reading in range(readings):
        problem = dataclasses.replace(survey, reading=reading, extremes=survey.extremes and reading == 0)
        bracket, work, *rows = _survey(matrix, problem, bracket, work)
        found += rows
    chunks = matrix.size // device.TILE
    problem = dataclasses.replace(survey, reading=readings)
    bits = triton_call(
        functools.partial(device.finish_kernel, problem=problem, chunks=chunks, padding=padding),
        jax.ShapeDtypeStruct((2,), jnp.int32),
        matrix.reshape(-1), bracket, work,
        name="fp4jax_quantile_finish", warps=8,
    )  # fmt: skip
    values = lax.bitcast_convert_type(bits.astype(jnp.int16), x.dtype)
    return (values[0], values[1]), RowExtremes(*found) if found else None


def _flattened(x: Array) -> Array:
    """The values of x in rows that a reading can always count, with -infinity at the end, which sorts first."""
    small = x.size <= device.LARGEST_GRID * _ROWS * _FLAT  # so that programs of one tile's rows are not too many
    padding = -x.size % (_ROWS * _FLAT * (1 if small else _GROUPS[0]))
    flat = jnp.pad(x.reshape(-1), (0, padding), constant_values=-np.inf) if padding else x.reshape(-1)
    return flat.reshape(-1, _FLAT)


def survey_of(shape: tuple[int, ...], needs: tuple[int, ...], *, extremes: bool = True) -> device.Survey | None:
    """How a matrix of 16-bit values is read.

    None where its sides are no multiples of a tile's (of 16 rows, with ``extremes``), where a row is too long for the
    counts of one program, or where rows are so many and so short that programs are too many for sums of their counts.
    """
    if len(shape) != 2 or shape[1] % _COLS or shape[0] % _ROWS:
        return None
    m, chunks = shape[0], shape[1] // _COLS
    if extremes and m % 16:
        return None
    most = min(device.LARGEST_COUNT // chunks, device.LARGEST_PROGRAM // (_ROWS * shape[1]))
    groups = next((g for g in _GROUPS if m % (_ROWS * g) == 0 and g <= most), None)
    if groups is None or (needs and m // (_ROWS * groups) > device.LARGEST_GRID):
        return None
    unroll = 1 if interpreting() else min(_UNROLL, chunks)
    return device.Survey(_ROWS, _COLS, groups, chunks, unroll, needs, 0, extremes)


def row_extremes(x: Array) -> RowExtremes | None:
    """The extremes of the rows of a matrix, or None as in ``order_statistics_and_extremes``."""
    survey = None if x.dtype == np.float32 else survey_of(x.shape, ())
    return None if survey is None else RowExtremes(*_survey(x, survey))


def _survey(x: Array, problem: device.Survey, *state: Array) -> tuple[Array, ...]:
    """Runs one reading; ``state`` is the bracket and the counters, which come back changed, before the extremes."""
    rows = [jax.ShapeDtypeStruct((x.shape[0],), jnp.float32)] * (2 * problem.extremes)
    name = "fp4jax_quantile_survey" if state else "fp4jax_extremes"
    return triton_call(
        functools.partial(device.survey_kernel, problem=problem),
        [*(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in state), *rows],
        x, *state,
        name=name, grid=(x.shape[0] // (problem.rows * problem.groups),),
        aliases={2: 1} if state else {},
    )  # fmt: skip


def _stride(n: int) -> int:
    """Between the values of a sample of n. Odd: an even one meets the same channels in every row, as outliers do."""
    return -(-n // SAMPLES) | 1


def _brackets(flat: Array, n: int, ranks: tuple[int, int], readings: int) -> tuple[Array, Array]:
    """Keys between which the ranks probably lie, int32 [4], from a strided sample; and the counters, the rest zeros."""
    stride = _stride(n)
    programs = ((n - 1) // stride + 1) // device.SAMPLED
    size = programs * device.SAMPLED
    work = jnp.zeros(device.BINS + readings * device.COUNTERS, jnp.float32)
    if interpreting():  # which would count equal keys once
        keys = device.key_of(flat[: (size - 1) * stride + 1 : stride])
        work = work.at[device.counter_of(keys)].add(1)
    else:
        work = triton_call(
            functools.partial(device.histogram_kernel, stride=stride),
            jax.ShapeDtypeStruct(work.shape, work.dtype),
            flat, work,
            name="fp4jax_quantile_histogram", grid=(programs,), warps=8, aliases={1: 0},
        )  # fmt: skip
    places = []
    for rank in ranks:
        share = (rank + 0.5) / n
        left_out = n - size if stride == 1 else 0  # at the end of a small tensor
        spread = left_out + 1 if stride == 1 else _SIGMAS * math.sqrt(share * (1 - share) * size) + 1
        center = share * size - 0.5
        places += [max(int(center - spread), 0), min(math.ceil(center + spread), size - 1)]
    keys = triton_call(
        functools.partial(device.brackets_kernel, places=tuple(places)),
        jax.ShapeDtypeStruct((4,), jnp.int32),
        work,
        name="fp4jax_quantile_brackets", grid=(4,), warps=16,
    )  # fmt: skip
    return keys, work


def _readings(ranks: tuple[int, int], n: int, mantissa_bits: int) -> int:
    """How many readings decide the ranks of a tensor whose tail beyond them falls no slower than 1/x.

    There ranks a share δ/2 to either side lie w = 2^mantissa_bits · log2((1 + δ/2) / (1 - δ/2)) + 1 keys apart. Parts
    are powers of two, so that one reading decides a bracket of six keys, and each further one a bracket four times as
    wide. The later ones end at once where a lighter tail has been decided.
    """
    if n <= SAMPLES:
        return 2
    size = -(-n // _stride(n))
    tail = min(min(rank + 1, n - rank) for rank in ranks) / n
    half = min(_SIGMAS * math.sqrt((1 - tail) / (tail * size)), 0.99)
    keys = 2**mantissa_bits * math.log2((1 + half) / (1 - half)) + 1
    return 1 + max(1, math.ceil(math.log(keys / device.INNER, 4)))

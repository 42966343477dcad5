"""Exact order statistics of a whole BF16 or FP16 tensor on one GPU, mostly in one or two readings of it.

A sorted sample of 2¹⁸ values brackets each rank to a few of the 2¹⁶ possible values. One reading counts the values
below the bracket and at six places inside; it decides the rank, or leaves a bracket six times narrower for another
reading. Whatever the sample says, the answer is that of counting: a rank outside its bracket is bisected.
"""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from fp4jax import outliers
from fp4jax.kernels.device import triton_call
from fp4jax.kernels.quantile_device import (
    BINS,
    CHUNK,
    CHUNKS,
    HIGHEST,
    INNER,
    LOWEST,
    count_kernel,
    finish_kernel,
    key_of,
    width_shift,
)  # fmt: skip
from fp4jax.typing import Array, AxisName

DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
SAMPLES = 2**18
_SIGMAS = 4  # half width of a bracket, in standard deviations of the rank of a sampled value


def order_statistics(x: Array, ranks: tuple[int, int], *, names: tuple[AxisName, ...] = ()) -> tuple[Array, Array]:
    """The two values that would stand at ``ranks`` were all of ``x`` sorted; equal to sorting, bit for bit.

    The kernels read 16-bit values of one device. Others are counted by the reference, a reading a bit
    (``fp4jax.outliers.order_statistics``).

    Args:
        x: bfloat16, float16 or float32, any shape but empty. NaN sorts last, or first if its sign bit is set.
        ranks: static positions in the sorted order.
        names: manual mesh axes over which the values are split, inside a ``jax.shard_map(check_vma=False)``; ranks are
            those among all of them.

    Returns:
        Two scalars of the dtype of ``x``.

    Raises:
        TypeError: for another dtype.
        ValueError: for a rank out of range, or 2³¹ values or more.
    """
    x = jnp.asarray(x)
    n = math.prod(x.shape) * math.prod(lax.axis_size(name) for name in names)
    if x.dtype not in DTYPES:
        raise TypeError(f"x has dtype {x.dtype}; the exact quantile takes bfloat16, float16 or float32")
    if len(ranks) != 2 or not all(0 <= r < n for r in ranks):
        raise ValueError(f"ranks={ranks} must be two positions in the {n} values of x")
    if n >= 2**31:
        raise ValueError(f"an exact quantile of {n} values overflows its int32 counts; use OCC(quantile='sampled')")
    flat = x.reshape(-1)
    if names or x.dtype == np.float32:
        first, second = outliers.order_statistics(flat, ranks, (-1,), names)
        return first.reshape(()).astype(x.dtype), second.reshape(()).astype(x.dtype)
    low, high = _brackets(flat, ranks)
    if n % CHUNK:  # with what sorts last
        last = lax.bitcast_convert_type(jnp.int16(HIGHEST), x.dtype)
        flat = jnp.concatenate([flat, jnp.broadcast_to(last, (-n % CHUNK,))])
    wanted = jnp.asarray(ranks, jnp.int32)
    for reading in range(_readings(ranks, n, jnp.finfo(x.dtype).nmant)):
        low, high = _narrow(flat, low, high, wanted, reading == 0)
    keys = triton_call(
        functools.partial(finish_kernel, chunks=flat.size // CHUNK),
        jax.ShapeDtypeStruct((2,), jnp.int32),
        flat, low, high, wanted,
        name="fp4jax_quantile_finish", warps=8,
    )  # fmt: skip
    bits = jnp.where(keys < 0, keys ^ HIGHEST, keys).astype(jnp.int16)
    values = lax.bitcast_convert_type(bits, x.dtype)
    return values[0], values[1]


def _stride(n: int) -> int:
    """Between the values of a sample of n. Odd: an even one meets the same channels in every row, as outliers do."""
    return -(-n // SAMPLES) | 1


def _brackets(flat: Array, ranks: tuple[int, int]) -> tuple[Array, Array]:
    """Keys between which the ranks probably lie, from a strided sample; int32 [2] each."""
    n = flat.size
    stride = _stride(n)
    sample = lax.sort(key_of(flat[::stride]).astype(jnp.int16), is_stable=False)
    size = sample.size
    ends = []
    for rank in ranks:
        share = (rank + 0.5) / n
        spread = _SIGMAS * math.sqrt(share * (1 - share) * size) + 1 if stride > 1 else 0
        center = share * size - 0.5
        ends.append((max(int(center - spread), 0), min(math.ceil(center + spread), size - 1)))
    keys = sample[np.asarray(ends)].astype(jnp.int32)
    return keys[:, 0], keys[:, 1]


def _readings(ranks: tuple[int, int], n: int, mantissa_bits: int) -> int:
    """How many readings decide the ranks of a tensor whose tail beyond them falls no slower than 1/x.

    There a bracket that spans a share δ of its tail spans 2^mantissa_bits · log2(1 + δ) keys, and each reading leaves
    a sixth of them. The later ones end at once where a lighter tail has been decided.
    """
    if n <= SAMPLES:
        return 2
    size = -(-n // _stride(n))
    tail = min(min(rank + 1, n - rank) for rank in ranks) / n
    spread = 2 * _SIGMAS * math.sqrt((1 - tail) / (tail * size))
    return max(2, math.ceil(math.log(2**mantissa_bits * math.log2(1 + spread), INNER)))


def _narrow(flat: Array, low: Array, high: Array, ranks: Array, first: bool) -> tuple[Array, Array]:
    """One reading: the brackets that are left. The first checks what the sample says, even of a bracket of one key."""
    total = flat.size // CHUNK
    chunks = math.gcd(total, CHUNKS)
    counts = triton_call(
        functools.partial(count_kernel, chunks=chunks, always=first),
        jax.ShapeDtypeStruct((total // chunks, 2, BINS), jnp.int32),
        flat, low, high,
        name="fp4jax_quantile_count", grid=(total // chunks,),
    )  # fmt: skip
    running = jnp.cumsum(jnp.sum(counts, axis=0, dtype=jnp.int32), axis=1)
    place = jnp.sum((running <= ranks[:, None]).astype(jnp.int32), axis=1)  # the bin that holds the rank
    shift = width_shift(low, high)
    start = low + ((place - 1) << shift)
    below, above = place == 0, place == BINS - 1
    new_low = jnp.where(below, LOWEST, jnp.where(above, jnp.minimum(low + (INNER << shift), HIGHEST), start))
    new_high = jnp.where(below, low - 1, jnp.where(above, HIGHEST, start + (1 << shift) - 1))
    if first:
        return new_low, new_high
    closed = low >= high
    return jnp.where(closed, low, new_low), jnp.where(closed, high, new_high)

"""Exact order statistics of a whole tensor on a GPU, by counting: most often in one reading of it.

A sorted sample brackets each rank to a few of the possible values. One reading counts the values between 15 boundaries
around each bracket, which decides the rank or leaves a narrower bracket for another reading. Whatever the sample says,
the answer is that of counting: as many readings are launched as the worst case takes, and those that find nothing left
to decide read nothing.
"""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from fp4jax.kernels.device import core_count, interpreting, triton_call
from fp4jax.kernels.quantile_device import LIMIT, STEPS, Reading, count_kernel, float_of_key, key_of, narrowed
from fp4jax.typing import Array, AxisName

DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
SAMPLES = 2**16
TILE = 1024
PROGRAMS = 4  # for each multiprocessor
READINGS = {16: 8, 32: 12}
"""By bits of a value. A reading leaves at most a 14th of a bracket, rounded up to a power of two; a 16-bit reading
covers at most 14 · 2¹¹ keys, so that two more may be needed to find them."""
_SIGMAS = 4  # half width of a bracket, in standard deviations of the rank of a sampled value


def order_statistics(x: Array, ranks: tuple[int, int], *, names: tuple[AxisName, ...] = ()) -> tuple[Array, Array]:
    """The two values that would stand at ``ranks`` were all of ``x`` sorted; equal to sorting, bit for bit.

    Args:
        x: bfloat16, float16 or float32, any shape but empty. NaN sorts last, or first if its sign bit is set.
        ranks: static positions in the sorted order, the lower one first.
        names: manual mesh axes over which the values are split, inside a ``jax.shard_map(check_vma=False)``; ranks are
            those among all of them. Devices exchange a sample and 32 counts a reading.

    Returns:
        Two scalars of the dtype of ``x``.

    Raises:
        TypeError: for another dtype.
        ValueError: for ranks out of range or order, or 2³¹ values or more.
    """
    x = jnp.asarray(x)
    devices = math.prod(lax.axis_size(name) for name in names)
    n = math.prod(x.shape) * devices
    if x.dtype not in DTYPES:
        raise TypeError(f"x has dtype {x.dtype}; the exact quantile takes bfloat16, float16 or float32")
    if len(ranks) != 2 or not 0 <= ranks[0] <= ranks[1] < n:
        raise ValueError(f"ranks={ranks} must be two positions, in order, in the {n} values of x")
    if n >= 2**31:
        raise ValueError(f"an exact quantile of {n} values overflows its int32 counts; use OCC(quantile='sampled')")
    flat = x.reshape(-1)
    bits = 8 * x.dtype.itemsize
    reading, wanted = _reading(flat.size, bits), jnp.asarray(ranks, jnp.int32)

    def read(index, carry):
        state, counts = carry
        state, counts = count(index, flat, wanted, state, counts, reading)
        if names:
            own = lax.psum(lax.dynamic_slice(counts, (32 * index,), (32,)), names)
            counts = lax.dynamic_update_slice(counts, own, (32 * index,))
        return state, counts

    readings = READINGS[bits]
    state, counts = lax.fori_loop(
        0, readings, read, (_brackets(flat, ranks, n, names), jnp.zeros(32 * readings, jnp.int32))
    )
    brackets = (state[0], state[1]), (state[2], state[3])
    (low0, _), (low1, _) = narrowed(brackets, counts[-32:], wanted, reading.highest, trusted=True)
    return float_of_key(low0, x.dtype), float_of_key(low1, x.dtype)


def _reading(size: int, bits: int) -> Reading:
    """How to cut up ``size`` values: so that every multiprocessor has PROGRAMS programs, if there is enough to do."""
    interpreted = interpreting()
    tile = 64 if interpreted else TILE
    repeats = round(size / (tile * STEPS * PROGRAMS * core_count()))
    return Reading(size, tile, min(max(repeats, 1), LIMIT), bits, interpreted)


def count(
    index: Array, flat: Array, ranks: Array, state: Array, counts: Array, reading: Reading
) -> tuple[Array, Array]:
    """The ``index``-th reading. Between readings the counts of devices may be summed: see ``count_kernel``.

    Returns:
        The brackets uint32 [4] around which was counted, and ``counts`` with the 32 of this reading filled in.
    """
    outs = [jax.ShapeDtypeStruct((4,), jnp.uint32), jax.ShapeDtypeStruct(counts.shape, jnp.int32)]
    return triton_call(
        functools.partial(count_kernel, reading=reading), outs, jnp.int32(index), flat, ranks, state, counts,
        name="fp4jax_quantile_count", grid=(reading.programs,), aliases={4: 1},
    )  # fmt: skip


def _brackets(flat: Array, ranks: tuple[int, int], n: int, names: tuple[AxisName, ...]) -> Array:
    """Keys between which the ranks probably lie, from a strided sample: uint32 [low, high, low, high]."""
    devices = n // flat.size
    # An odd stride: an even one would meet the same channels in every row, and outliers sit in fixed channels.
    stride = -(-flat.size * devices // SAMPLES) | 1
    sample = key_of(flat[::stride])
    if names:
        sample = lax.all_gather(sample, names, tiled=True)
    small = jnp.uint16 if flat.dtype.itemsize == 2 else jnp.uint32
    sample = lax.sort(sample.astype(small))
    size, ends = sample.size, []
    for rank in ranks:
        share = (rank + 0.5) / n
        spread = _SIGMAS * math.sqrt(share * (1 - share) * size) + 1 if size < n else 0
        center = share * size - 0.5
        ends += [max(math.floor(center - spread), 0), min(math.ceil(center + spread), size - 1)]
    return sample[np.asarray(ends)].astype(jnp.uint32)

"""float32 arithmetic that comes out the same on every device: pinned inputs, and subnormals that are not flushed."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.typing import Array

_TINY = np.float32(2.0**-126)
_INFINITY = np.int32(0x7F800000)


def as_float32(x: Array) -> Array:
    """Exact float32 of a float32, bfloat16 or float16 array, pinned to the precision of its dtype.

    Without the pin XLA may hand on the unrounded float32 from which the bfloat16 was made: 250 of 256 scales then
    differed between jit and eager. The bit path also keeps subnormal bfloat16 values.

    Raises:
        TypeError: for any other dtype.
    """
    match x.dtype:
        case jnp.float32:
            return x
        case jnp.bfloat16:
            bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
            return lax.bitcast_convert_type(bits, jnp.float32)
        case jnp.float16:
            return lax.reduce_precision(x, 5, 10).astype(jnp.float32)
    raise TypeError(f"x has dtype {x.dtype}; quantization takes float32, bfloat16 or float16 (cast it first)")


def pinned(x: Array) -> Array:
    """x as one array that is computed once, whatever reads it.

    The compiler may copy what makes x into each loop that reads it, and round it differently in each (a · b + c in one
    rounding or in two): the maximum of x is then taken of other numbers than are divided by it, and x - clamp(x) is not
    0 where nothing is clamped. Every quantizer therefore begins here.
    """
    return lax.optimization_barrier(x)


def magnitude(x: Array) -> Array:
    """|x| to take a maximum of: NaN becomes infinity, and a subnormal 2⁻¹²⁶.

    XLA's CPU code drops NaN from a maximum of 4,096 values or more (jax 0.11.2); flushing to zero would hide a block
    of subnormals.
    """
    field = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    value = lax.bitcast_convert_type(jnp.minimum(field, _INFINITY), jnp.float32)
    return jnp.where(field == 0, jnp.float32(0), jnp.maximum(value, _TINY))


def multiply(x: Array, r: Array) -> Array:
    """x · r rounded once, with subnormal x as IEEE 754 has it: XLA's CPU and GPU code reads a subnormal factor as 0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    field = bits & 0x7FFFFFFF
    # A subnormal is field · 2⁻¹⁴⁹. Its power of two is moved into r by integer arithmetic: as float constants the
    # compiler would fold the halves of 2⁻¹⁴⁹ into one that is flushed. Where that ends below 0, x · r rounds to 0.
    lowered = jnp.maximum(lax.bitcast_convert_type(r, jnp.int32) - (125 << 23), 0)
    units = (field.astype(jnp.float32) * jnp.float32(2.0**-24)) * lax.bitcast_convert_type(lowered, jnp.float32)
    subnormal = jnp.where(bits < 0, -units, units)
    return jnp.where((field < 0x00800000) & jnp.isfinite(r), subnormal, x * r)


def divide(a: Array, b: Array) -> Array:
    """a / b rounded once, for positive normal a and b with a normal quotient; anything else is unspecified.

    XLA's GPU code divides float32 approximately: of 1,004,000 quotients 6 / b it got 344,643 wrong, by up to two
    units in the last place (H200, jax 0.11.2). So the quotient of the 24-bit significands is estimated, then corrected
    by its remainder, which is exact modulo 2³² whatever the estimate.
    """
    a, b = (lax.bitcast_convert_type(v, jnp.int32) for v in (a, b))
    top, bottom = ((v & 0x007FFFFF) | 0x00800000 for v in (a, b))
    smaller = (top < bottom).astype(jnp.int32)
    shift = 23 + smaller  # puts the quotient into [2²³, 2²⁴)
    power = lax.bitcast_convert_type((shift + 127) << 23, jnp.float32)
    quotient = (top.astype(jnp.float32) / bottom.astype(jnp.float32) * power).astype(jnp.int32)
    remainder = (top << shift) - quotient * bottom
    for _ in range(4):  # an estimate two units off needs two
        step = (remainder >= bottom).astype(jnp.int32) - (remainder < 0).astype(jnp.int32)
        quotient, remainder = quotient + step, remainder - step * bottom
    quotient = quotient + (2 * remainder > bottom).astype(jnp.int32)  # a quotient of floats is never a tie
    exponent = (a >> 23) - (b >> 23) + 127 - smaller + (quotient >> 24)
    return lax.bitcast_convert_type((exponent << 23) | (quotient & 0x007FFFFF), jnp.float32)

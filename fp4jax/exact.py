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


def magnitude(x: Array) -> Array:
    """|x| to take a maximum of: NaN becomes infinity, and a subnormal 2⁻¹²⁶.

    XLA's CPU code drops NaN from a maximum (jax 0.11.2: jnp.max of sixteen values, one of them NaN, is not NaN), and
    flushing to zero would hide a block of subnormals.
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

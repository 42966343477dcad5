"""How the optimizer holds a float32 array between steps: in fewer bits, with scales, and without bias.

An average such as ``m ← b1·m + (1 - b1)·g`` moves by a small part of itself a step. Rounded to nearest, a step below
half a unit in the last place is lost, every time: m in E4M3 stays up to a third away from g, and v in FP16 (b2 = .999)
as much from g². So whatever is averaged is rounded stochastically, which keeps the mean exact.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.exact import as_float32
from fp4jax.formats import E4M3, E5M2, FloatFormat
from fp4jax.optim.stochastic import HashedStochastic, Words, hashed_noise
from fp4jax.quantize import QTensor, QuantSpec, quantize
from fp4jax.rounding import NOISE_BITS
from fp4jax.scaling import AbsMax, Granularity, manual_axes
from fp4jax.typing import Array, AxisName

FP16 = FloatFormat("fp16", 5, 10, 65504.0, np.float16)

EIGHT_BITS = {np.dtype(f.dtype): f for f in (E4M3, E5M2)}
SCALED = {**EIGHT_BITS, np.dtype(FP16.dtype): FP16}
PLAIN = (np.dtype(jnp.bfloat16), np.dtype(jnp.float32))


def resolve_dtype(name: str, dtype: object, among: Iterable[np.dtype]) -> np.dtype:
    """The one of ``among`` that ``dtype`` (a dtype, its name, or a ``FloatFormat``) names.

    Raises:
        ValueError: if there is none; the error calls the argument ``name``.
    """
    named = dtype.dtype if isinstance(dtype, FloatFormat) else dtype
    for candidate in among:
        if named in (candidate.name, candidate, candidate.type):
            return candidate
    raise ValueError(f"{name}={dtype!r} is not supported; use one of {', '.join(d.name for d in among)}")


def storage(dtype: np.dtype, granularity: Granularity, rounding: HashedStochastic) -> QuantSpec | np.dtype:
    """How to hold an array in ``dtype``: scaled where the dtype is narrow in range, else as it is."""
    if dtype in SCALED:
        return QuantSpec(SCALED[dtype], granularity, AbsMax(), rounding)
    return dtype


def hold(x: Array, how: QuantSpec | np.dtype, words: Words) -> QTensor | Array:
    """Rounds float32 ``x`` to its stored form. A scaled scalar is held as one of shape [1]: scales need an axis."""
    if isinstance(how, QuantSpec):
        return quantize(x.reshape(x.shape or (1,)), how, axis=-1, key=words)
    if how == jnp.bfloat16:
        return stochastic_bfloat16(x, words)
    return x.astype(how)


def value(held: QTensor | Array, shape: tuple[int, ...]) -> Array:
    """The float32 array that a stored form stands for."""
    return (held.dequantize() if isinstance(held, QTensor) else as_float32(held)).reshape(shape)


def stochastic_bfloat16(x: Array, words: Words) -> Array:
    """Rounds float32 to bfloat16, up in magnitude with probability of the part cut off; NaN and infinity stay."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    raised = bits + (hashed_noise(words, x.shape).astype(jnp.uint32) >> (NOISE_BITS - 16))
    landed = lax.bitcast_convert_type((raised >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), landed, x.astype(jnp.bfloat16))


def is_quantized(x: object) -> bool:
    """Whether ``x`` is a ``QTensor``: as ``is_leaf``, it makes a quantized weight one leaf."""
    return isinstance(x, QTensor)


def check_floating(path: tuple, leaf: Array) -> None:
    """Raises TypeError unless a leaf is a float32, bfloat16 or float16 array."""
    dtype = jnp.result_type(leaf)
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"parameter {jax.tree_util.keystr(path)} has dtype {dtype}; the optimizer takes float32, bfloat16 or "
            "float16 leaves: split others off first, with optax.masked or optax.multi_transform (in Flax NNX, "
            "wrt=nnx.Param)"
        )


def shared_axes(x: Array, axis_name: AxisName | None) -> tuple[AxisName, ...]:
    """The mesh axes that devices must agree over: those named, else those on which ``x`` varies in a ``shard_map``."""
    if axis_name is None:
        return manual_axes(x)
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)

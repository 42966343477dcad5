"""How the optimizer holds a float32 array between steps: in fewer bits, with scales, and without bias.

An average such as ``m ← b1·m + (1 - b1)·g`` moves by a small part of itself a step. Rounded to nearest, a step below
half a unit in the last place is lost, every time: m in E4M3 stays up to a third away from g, and v in FP16 (b2 = .999)
as much from g². So whatever is averaged is rounded stochastically, which keeps the mean exact.

Values and scales are kept in two trees of plain arrays, both like the parameters, rather than in ``QTensor``s: values
have the shape of their parameter and shard like it, and what walks a state (Flax, Orbax) meets arrays only.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fp4jax.exact import as_float32
from fp4jax.formats import E4M3, E5M2, FloatFormat
from fp4jax.optim.stochastic import HashedStochastic, Words, hashed_noise, leaf_words
from fp4jax.quantize import QTensor, QuantSpec, quantize
from fp4jax.rounding import NOISE_BITS
from fp4jax.scaling import AbsMax, Granularity, ScaleRule, manual_axes
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


@dataclasses.dataclass(frozen=True)
class Storage:
    """The stored form of a tree of float32 arrays: a tree of values and one of scales (None for a dtype without).

    Attributes:
        dtype: of the values.
        spec: how values of a narrow dtype are scaled and rounded; None for bfloat16, which is rounded stochastically,
            and for float32.
    """

    dtype: np.dtype
    spec: QuantSpec | None

    @classmethod
    def make(
        cls, dtype: np.dtype, granularity: Granularity, rounding: HashedStochastic, scale: ScaleRule = AbsMax()
    ) -> "Storage":
        """Scaled where the dtype is narrow in range, else as it is."""
        return cls(dtype, QuantSpec(SCALED[dtype], granularity, scale, rounding) if dtype in SCALED else None)

    def zeros(self, like: optax.Params) -> tuple[optax.Params, optax.Params | None]:
        """The stored form of zeros, of the shapes and shardings of ``like``: values 0 under scales 1."""
        values = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=self.dtype), like)
        if self.spec is None:
            return values, None
        # Outside of shard_map there is no mesh axis to agree over, and zeros need none. The scales are made from zeros,
        # not from a shape alone, since on an Explicit mesh their sharding is part of their type.
        granularity: Any = self.spec.granularity
        if granularity.axis_name is not None:
            granularity = dataclasses.replace(granularity, axis_name=())

        def scale(p):
            zeros = _with_an_axis(jnp.zeros_like(p, dtype=jnp.float32))
            return jnp.ones_like(granularity.reduce_max(zeros, (-1,)))

        return values, jax.tree.map(scale, like)

    def store_tree(self, tree: optax.Params, words: Words, name: str) -> tuple[optax.Params, optax.Params | None]:
        """The stored form of a tree; each leaf has noise of its own, which ``name`` and its path set apart."""
        paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
        pairs = [self.store(x, leaf_words(words, path, name)) for path, x in paths]
        values, scales = (treedef.unflatten([pair[i] for pair in pairs]) for i in (0, 1))
        return values, None if self.spec is None else scales

    def load_tree(self, values: optax.Params, scales: optax.Params | None) -> optax.Params:
        """The float32 arrays that a stored form stands for."""
        if scales is None:
            return jax.tree.map(lambda v: self.load(v, None), values)
        return jax.tree.map(self.load, values, scales)

    def store(self, x: Array, words: Words) -> tuple[Array, Array | None]:
        """Values and scales of one float32 array."""
        if self.spec is not None:
            q = quantize(_with_an_axis(x), self.spec, axis=-1, key=words)
            return q.values.reshape(x.shape), q.scale
        return (stochastic_bfloat16(x, words) if self.dtype == jnp.bfloat16 else x), None

    def load(self, values: Array, scale: Array | None) -> Array:
        """The float32 array of one leaf."""
        if self.spec is None or scale is None:
            return as_float32(values)
        q = QTensor(_with_an_axis(values), scale, None, self.spec, (-1,))
        return q.dequantize().reshape(values.shape)


def _with_an_axis(x: Array) -> Array:
    """Scales need an axis, so that a scalar has one of shape [1]."""
    return x.reshape(x.shape or (1,))


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

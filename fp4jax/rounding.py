"""How a real number lands on the grid of a format.

A float32 ``u`` is first clipped to ±max. With e its exponent (at least that of the smallest normal value) and
``step = 2^(e - mantissa_bits)``, the neighbors of u are ``floor(|u| / step)`` and one more, times step. All of this
is exact in float32, so every backend agrees bit for bit, and no narrower type stands in between. NaN stays NaN.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.formats import FloatFormat
from fp4jax.typing import Array, Key

NOISE_BITS = 24


def _steps(u: Array, format: FloatFormat) -> tuple[Array, Array, Array]:
    """Biased exponent of u (int32), and the grid step there with its inverse: powers of two, float32."""
    bits = lax.bitcast_convert_type(u, jnp.int32)
    exponent = jnp.maximum((bits >> 23) & 0xFF, format.min_exponent + 127)
    shifted = exponent - format.mantissa_bits
    step = lax.bitcast_convert_type(shifted << 23, jnp.float32)
    inverse = lax.bitcast_convert_type((254 - shifted) << 23, jnp.float32)
    return exponent, step, inverse


def position(u: Array, format: FloatFormat) -> Array:
    """Where |u| stands in its grid interval: 0 on the lower end, 1/2 at the midpoint, below 1; float32.

    Args:
        u: float32 array in units of the grid. Anything past ±max counts as ±max, which is on the grid.
    """
    magnitude = jnp.minimum(jnp.abs(u), jnp.float32(format.max))
    _, _, inverse = _steps(magnitude, format)
    scaled = magnitude * inverse
    return scaled - jnp.floor(scaled)


@dataclasses.dataclass(frozen=True)
class Rounding(abc.ABC):
    """A rule that takes float32 to the grid of a format; saturates at ±max; a zero result keeps the sign of its
    input.
    """

    name = ""
    needs_key = False

    def __call__(self, u: Array, format: FloatFormat, key: Key | None = None) -> Array:
        """Rounds ``u`` (float32, in units of the grid) to values of ``format``, as float32.

        Raises:
            ValueError: if the rule needs a key and ``key`` is None.
        """
        if self.needs_key and key is None:
            raise ValueError(f"rounding={self!r} draws noise and key=None; pass key=jax.random.key(...)")
        limit = jnp.float32(format.max)
        u = lax.clamp(-limit, u, limit)
        exponent, step, inverse = _steps(u, format)
        return self._land(u * inverse, exponent, format, key) * step

    @abc.abstractmethod
    def _land(self, scaled: Array, exponent: Array, format: FloatFormat, key: Key | None) -> Array:
        """Takes u / step to an integer-valued float32."""

    def __repr__(self) -> str:
        return self.name.upper()


class NearestEven(Rounding):
    """To the nearest value, ties to the even code: ml_dtypes' cast, and the hardware's (IEEE 754 roundTiesToEven)."""

    name = "nearest_even"

    def _land(self, scaled, exponent, format, key):
        nearest = lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN)
        if format.mantissa_bits:
            return nearest
        # Without a mantissa the last bit of a code is that of its exponent, so half the ties (|scaled| = 1.5) go down.
        # exponent is biased by 127: the code of the lower neighbor is exponent - 127 - min_exponent + 1.
        lower_is_even = (exponent - format.min_exponent) % 2 == 0
        tie = jnp.abs(scaled) == jnp.float32(1.5)
        return jnp.where(tie & lower_is_even, lax.sign(scaled), nearest)


class TiesUp(Rounding):
    """To the nearest value, ties toward +infinity: the lookup table of the paper's kernel (arXiv:2501.17116, App.
    A).
    """

    name = "ties_up"

    def _land(self, scaled, exponent, format, key):
        # floor(scaled + .5) would round the sum: .49999997 + .5 is 1 in float32.
        floor = jnp.floor(scaled)
        landed = floor + (scaled - floor >= jnp.float32(0.5)).astype(jnp.float32)
        return _copysign(landed, scaled)


class Stochastic(Rounding):
    """Up with probability (|u| - lower) / (upper - lower) in magnitude, so the mean is u; 24-bit noise from ``key``.

    The noise of an element depends on the key and the element's index alone, never on the mesh. Under ``vmap`` over an
    axis that has no key of its own, the index along it is folded in, so that rows draw differently.
    """

    name = "stochastic"
    needs_key = True

    def _land(self, scaled, exponent, format, key):
        magnitude = jnp.abs(scaled)
        floor = jnp.floor(magnitude)
        threshold = (magnitude - floor) * jnp.float32(2**NOISE_BITS)
        assert key is not None  # __call__ has checked
        landed = floor + (noise(key, scaled) < threshold).astype(jnp.float32)
        return _copysign(landed, scaled)


NEAREST_EVEN, TIES_UP, STOCHASTIC = NearestEven(), TiesUp(), Stochastic()
ROUNDINGS = {r.name: r for r in (NEAREST_EVEN, TIES_UP, STOCHASTIC)}


def _copysign(magnitude: Array, sign: Array) -> Array:
    """|magnitude| with the sign bit of ``sign``, so that -0 survives as it does in an IEEE cast."""
    keep = lax.bitcast_convert_type(magnitude, jnp.int32) & 0x7FFFFFFF
    return lax.bitcast_convert_type(keep | (lax.bitcast_convert_type(sign, jnp.int32) & -(2**31)), jnp.float32)


def keys_of_examples(axis_size: int, in_batched: Sequence[bool], keys: Key, like: Array) -> tuple[Key, Array]:
    """Keys and arrays with the mapped axis of a ``vmap`` in front; its index is folded into keys that lack it."""
    keys_batched, like_batched = in_batched
    if not keys_batched:
        index = jnp.arange(axis_size, dtype=jnp.uint32).reshape(-1, *[1] * keys.ndim)
        fold = jax.random.fold_in
        for _ in range(keys.ndim + 1):
            fold = jax.vmap(fold)
        keys = fold(jnp.broadcast_to(keys, (axis_size, *keys.shape)), jnp.broadcast_to(index, (axis_size, *keys.shape)))
    if not like_batched:
        like = jnp.broadcast_to(like, (axis_size, *like.shape))
    return keys, like


@jax.custom_batching.custom_vmap
def _noise(keys: Key, like: Array) -> Array:
    """Noise for ``like`` [*lead, *rest] from typed keys [*lead]."""
    draw = functools.partial(jax.random.bits, shape=like.shape[keys.ndim :], dtype=jnp.uint32)
    for _ in range(keys.ndim):
        draw = jax.vmap(draw)
    return (draw(keys) >> (32 - NOISE_BITS)).astype(jnp.float32)


@_noise.def_vmap
def _noise_vmap(axis_size, in_batched, keys, like):
    # The mapped axis joins the lead, so that a vmap around this one is seen by this rule again.
    return _noise(*keys_of_examples(axis_size, in_batched, keys, like)), True


def noise(key: Key, like: Array) -> Array:
    """Integers 0 … 2²⁴-1 as float32, one for each element of ``like`` (whose values do not matter)."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim:
        raise ValueError(f"key has shape {key.shape}; pass one key (under jax.vmap, one an example)")
    return _noise(key, lax.stop_gradient(like))

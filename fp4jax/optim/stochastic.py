"""Stochastic rounding whose noise is a hash: what the optimizer rounds with.

``fp4jax.STOCHASTIC`` draws from ``jax.random``. An optimizer rounds every parameter two or three times a step, in as
many places of the program as it has leaves, and threefry then costs more than all the rest, to run and to compile.
Here ``jax.random`` gives two words a step, and an integer hash of element, leaf and step gives the noise.
"""

import zlib
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.rounding import NOISE_BITS, Rounding
from fp4jax.typing import Array, Key

type Words = Array
"""uint32 [2]: the key of a hash."""


class HashedStochastic(Rounding):
    """Up in magnitude with probability (|u| - lower) / (upper - lower), so the mean is u; the key is ``Words``.

    The noise depends on the words and the element's index, never on the mesh. Examples under ``vmap`` share it unless
    their words differ.
    """

    name = "hashed_stochastic"
    needs_key = True

    def _land(self, scaled, exponent, format, key):
        magnitude = jnp.abs(scaled)
        floor = jnp.floor(magnitude)
        part = (magnitude - floor) * jnp.float32(2**NOISE_BITS)
        landed = floor + (hashed_noise(cast(Words, key), scaled.shape) < part).astype(jnp.float32)
        return jnp.where(scaled < 0, -landed, landed)


class Vanishing(HashedStochastic):
    """Stochastic, but what is below half the smallest value becomes zero.

    For a first moment: rounded up, a tiny m would be many times its size and still be divided by the √v of the tiny
    gradient, and the weight would jump by as many learning rates.
    """

    name = "vanishing_stochastic"

    def _land(self, scaled, exponent, format, key):
        landed = super()._land(scaled, exponent, format, key)
        return jnp.where(jnp.abs(scaled) < jnp.float32(0.5), jnp.float32(0), landed)


class Surviving(HashedStochastic):
    """Stochastic, but what is not zero never becomes zero.

    For a second moment: m / (√0 + eps) is an update of 1/eps learning rates.
    """

    name = "surviving_stochastic"

    def _land(self, scaled, exponent, format, key):
        landed = super()._land(scaled, exponent, format, key)
        return jnp.where(scaled > 0, jnp.maximum(landed, jnp.float32(1)), landed)


def step_words(seed: int | Array | Key, count: Array) -> Words:
    """The words of one step. ``seed`` may be a number, also a traced one, or a typed key."""
    typed = isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    return jax.random.bits(jax.random.fold_in(seed if typed else jax.random.key(seed), count), (2,), jnp.uint32)


def leaf_words(words: Words, path: tuple, purpose: str = "") -> Words:
    """The words of one leaf: they depend on its path alone, so that masking other leaves leaves its noise alone."""
    name = zlib.crc32((jax.tree_util.keystr(path) + purpose).encode())
    return words ^ jnp.array([name, 0], jnp.uint32)


def hashed_noise(words: Words, shape: tuple[int, ...]) -> Array:
    """Integers 0 … 2²⁴-1 as float32, one for each element of ``shape``."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        index += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    bits = _mix(_mix(index + words[0]) ^ words[1])
    return (bits >> (32 - NOISE_BITS)).astype(jnp.float32)


def _mix(x: Array) -> Array:
    """The integer hash ``lowbias32`` (Chris Wellons, *Prospecting for Hash Functions*, 2018; public domain)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)

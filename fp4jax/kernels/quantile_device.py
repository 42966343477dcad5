"""Device side of the exact quantile (Pallas on Triton): counts of 16-bit keys around two brackets, eight bins each.

Triton has no counters in shared memory. A thread keeps the eight counts of a bracket as the eight nibbles of one
int32, one for every place of its tile, and adds them to bytes after eight steps, before a nibble can overflow. Threads
exchange counts once, two in a word.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

BINS = 8  # the first counts the keys below the bracket, the last those above
INNER = BINS - 2
STEPS = 8
TILE = 1024
CHUNK = STEPS * TILE
CHUNKS = 4  # a program; a count of theirs fits 16 bits, and one of a place a byte
LOWEST, HIGHEST = -(2**15), 2**15 - 1


def key_of(x):
    """int32 key of a 16-bit float, in the order of the floats, in [-2¹⁵, 2¹⁵)."""
    bits = lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32)
    return bits ^ ((bits >> 15) & 0x7FFF)


def width_shift(low, high):
    """The smallest s for which INNER bins of 2ˢ keys cover [low, high]."""
    shift = jnp.zeros_like(low)
    for s in range(14):
        shift = shift + ((high - low + 1) > (INNER << s)).astype(jnp.int32)
    return shift


def count_kernel(x_ref, low_ref, high_ref, counts_ref, *, chunks: int, always: bool):
    """Counts of this program's values by bin, for each bracket [low, high]: [2, 8] of counts [programs, 2, 8].

    Reads nothing where both brackets are closed, unless told to ``always``.
    """
    program = pl.program_id(0)
    brackets = [(low_ref[i], high_ref[i]) for i in range(2)]
    open_ = (brackets[0][0] < brackets[0][1]) | (brackets[1][0] < brackets[1][1])
    shifts = [width_shift(low, high) for low, high in brackets]
    origins = [low - (jnp.int32(1) << shift) for (low, _), shift in zip(brackets, shifts, strict=True)]

    def chunk(c, totals):
        start = (program * chunks + c) * CHUNK
        packed = [jnp.zeros((TILE,), jnp.int32) for _ in brackets]
        for step in range(STEPS):
            keys = key_of(x_ref[pl.ds(start + step * TILE, TILE)])
            for i, (origin, shift) in enumerate(zip(origins, shifts, strict=True)):
                place = jnp.minimum(jnp.maximum((keys - origin) >> shift, 0), BINS - 1)
                packed[i] = packed[i] + (jnp.int32(1) << (place << 2))
        return tuple(
            total + (word & 0x0F0F0F0F)
            for total, word in zip(totals, (w for p in packed for w in (p, p >> 4)), strict=True)
        )

    reads = chunks if always else open_.astype(jnp.int32) * chunks
    # Of each bracket the even nibbles, then the odd ones.
    totals = lax.fori_loop(0, reads, chunk, (jnp.zeros((TILE,), jnp.int32),) * 4)
    for word, total in enumerate(totals):
        for byte in range(2):
            two = jnp.sum((total >> (8 * byte)) & 0x00FF00FF, dtype=jnp.int32)
            first = word % 2 + 2 * byte
            counts_ref[program, word // 2, first] = two & 0xFFFF
            counts_ref[program, word // 2, first + 4] = (two >> 16) & 0xFFFF


def finish_kernel(x_ref, low_ref, high_ref, rank_ref, key_ref, *, chunks: int):
    """Bisects what brackets are still open, alone and so slowly; most calls find both closed and copy ``low``."""
    for i in range(2):
        rank = rank_ref[i]

        def halve(bracket, rank=rank):
            low, high = bracket
            middle = (low + high) >> 1
            count = lax.fori_loop(
                0,
                chunks * STEPS,
                lambda c, total: (
                    total + jnp.sum((key_of(x_ref[pl.ds(c * TILE, TILE)]) <= middle).astype(jnp.int32), dtype=jnp.int32)
                ),
                jnp.int32(0),
            )
            return jnp.where(count > rank, low, middle + 1), jnp.where(count > rank, middle, high)

        key_ref[i] = lax.while_loop(lambda b: b[0] < b[1], halve, (low_ref[i], high_ref[i]))[0]

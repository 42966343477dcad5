"""Device side of the exact quantile (Pallas on Triton): a histogram of a sample, then counts at a few thresholds.

A 16-bit float has a key, its place among all floats of its type; -0 takes that of +0, and NaN of either sign the one
after infinity, as ``jnp.sort`` has them. A *bracket* [low, high] of keys, both ends included, holds the value at a
rank. It is cut into ``INNER`` parts of 2ˢ keys, and a reading counts the values at or above the first key of each part:
the value at the rank lies in the last part that as many values reach as are not below it. That part is the next
bracket. The first bracket comes from a sample and may miss, so the first reading counts at both its ends as well; what
it leaves is proven, as is all that follows from it.

Two values are counted an instruction: comparing gives 1 or 0 in the type of the values, and adding those is exact up to
256 (PTX ISA, ``set`` and ``add`` of ``bf16x2``, which sm_90 is the first to have). The same reading finds the largest
and smallest value of every row, which quantizing needs anyway.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from fp4jax.kernels.device import interpreting

BINS = 2**16  # keys, shifted to begin at 0
THRESHOLDS = 7  # of each bracket in the first reading: the first keys of its parts, and the end of the last
INNER = THRESHOLDS - 1  # parts of a bracket
COUNTERS = 32  # of a reading: the lower bytes of up to 16 counts, here two brackets' 14, then the upper bytes
LARGEST_COUNT = 256  # that bfloat16 holds with all smaller ones
LARGEST_PROGRAM = 2**16 - 1  # values of a program of a reading, whose counts are added up two in a word
LARGEST_GRID = 2**24 // 255  # programs of a reading: so many bytes add up exactly in float32
SAMPLED = 256  # values of a program of the histogram
TILE = 1024  # of ``finish_kernel``


def infinity_key(dtype) -> int:
    """The key of infinity; the next one stands for NaN."""
    return int(np.asarray(np.inf, dtype).view(np.int16))


def lowest_key(dtype) -> int:
    """The key of -infinity."""
    return -infinity_key(dtype) - 1


def key_of(x):
    """int32 keys of 16-bit floats."""
    bits = lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32)
    key = bits ^ ((bits >> 15) & 0x7FFF)
    infinity = infinity_key(x.dtype)
    key = jnp.where((bits & 0x7FFF) > infinity, infinity + 1, key)
    return jnp.where(key == -1, 0, key)


def counter_of(key):
    """Where a key is counted, by its lower byte first.

    Neighbors are frequent together, and additions to one line of L2 wait for each other.
    """
    place = key + BINS // 2
    return (place & 255) << 8 | place >> 8


def bits_of_key(key):
    """int32 of which the lower half are the bits of the float with this key."""
    return jnp.where(key < 0, key ^ 0x7FFF, key)


def float_of(key, dtype):
    """The float with this key; of zeros +0."""
    return lax.bitcast_convert_type(bits_of_key(key).astype(jnp.int16), dtype)


def _shift(low, high):
    """The smallest s for which INNER parts of 2ˢ keys cover [low, high]."""
    shift = jnp.zeros_like(low)
    for s in range(14):  # 6 · 2¹⁴ is more than all keys
        shift = shift + ((high - low + 1) > (INNER << s)).astype(jnp.int32)
    return shift


def _threshold(low, shift, i, dtype):
    """The first key of part i. No comparison tells NaN from infinity: a bracket of the two is left to bisection."""
    return jnp.minimum(low + (i << shift), infinity_key(dtype))


def _steps(reading: int) -> range:
    """The thresholds of a reading, as numbers of parts.

    The first reading checks both ends of a bracket; later ones know that the value at the rank lies inside.
    """
    return range(1, INNER) if reading else range(THRESHOLDS)


def _narrowed(low, high, reading: int, counts, need: int, dtype):
    """What a reading leaves of a bracket: ``counts`` values reach its thresholds, ``need`` the value at the rank.

    The value at the rank reaches a threshold if ``need`` values do, and lies between the last that it reaches and the
    one after. Past the ends of a bracket from the sample it may be any key. A later bracket holds it, so that the
    first threshold is reached uncounted, and the last part ends with the bracket; a part before that may end past it,
    which does no harm.
    """
    shift = _shift(low, high)
    place = jnp.int32(1 if reading else 0)  # thresholds that the value at the rank reaches
    for count in counts:
        place = place + (count >= need).astype(jnp.int32)
    new_low = _threshold(low, shift, jnp.maximum(place - 1, 0), dtype)
    new_high = _threshold(low, shift, place, dtype) - 1
    if reading:
        return new_low, jnp.where(place == INNER, high, new_high)
    new_low = jnp.where(place == 0, lowest_key(dtype), new_low)
    return new_low, jnp.where(place == THRESHOLDS, infinity_key(dtype) + 1, new_high)


@dataclasses.dataclass(frozen=True)
class Survey:
    """Static side of a reading of x [m, n].

    Attributes:
        rows, cols: of a tile; a program reads ``groups`` tiles below each other, ``chunks`` times from left to right.
        unroll: chunks of an iteration.
        needs: of each rank, how many values are not below it; empty where nothing is counted.
        reading: how many readings came before.
        extremes: whether the largest and smallest values of rows are wanted.
    """

    rows: int
    cols: int
    groups: int
    chunks: int
    unroll: int
    needs: tuple[int, ...]
    reading: int
    extremes: bool


def histogram_kernel(x_ref, _, work_ref, *, stride: int):
    """Adds this program's sample of flat x, every ``stride``-th value, to the first BINS counters of ``work``."""
    keys = key_of(x_ref[pl.ds(pl.program_id(0) * (SAMPLED * stride), SAMPLED, stride=stride)])
    # JAX 0.11.2 adds vectors of integers as if they were floats; so they are, and exact up to 2²⁴.
    triton.atomic_add(work_ref, (counter_of(keys),), jnp.ones((SAMPLED,), jnp.float32))


def brackets_kernel(work_ref, bracket_ref, *, places: tuple[int, ...]):
    """The key at one of the ``places`` in the sorted sample; a program each."""
    program = pl.program_id(0)
    place = jnp.int32(0)
    for i, p in enumerate(places):
        place = jnp.where(program == i, p, place)
    lower, sums = 128, jnp.zeros((256,), jnp.int32)  # lower bytes are looked at so many at a time
    for part in range(256 // lower):
        counts = work_ref[pl.ds(part * lower * 256, lower * 256)].reshape(lower, 256)
        sums = sums + jnp.sum(counts, axis=0).astype(jnp.int32)
    upper, before = _locate(sums, place, jnp.int32(0))
    counts = work_ref[pl.ds(upper, 256, stride=256)].astype(jnp.int32)
    bracket_ref[program] = upper * 256 + _locate(counts, place, before)[0] - BINS // 2


def _locate(counts, place, before):
    """The counter that holds a place, ``before`` which there are so many, and how many are before that counter."""
    sums = jnp.cumsum(counts, axis=0) + before
    passed = sums <= place
    return jnp.sum(passed.astype(jnp.int32), dtype=jnp.int32), jnp.maximum(before, jnp.max(jnp.where(passed, sums, 0)))


def _packed(name: str, dtype, *operands):
    """An instruction on two values at a time; ``$0`` is the result, ``$1`` and on are the operands."""
    kind = "bf16x2" if dtype == jnp.bfloat16 else "f16x2"
    code = {
        "count": f"{{\n.reg .b32 s;\nset.geu.{kind}.{kind} s, $2, $3;\nadd.rn.{kind} $0, $1, s;\n}}\n",
        "max": f"max.NaN.{kind} $0, $1, $2;",
        "min": f"min.NaN.{kind} $0, $1, $2;",
    }[name]
    [result] = triton.elementwise_inline_asm(
        code,
        args=operands,
        constraints=",".join(["=r", *("r" for _ in operands)]),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(operands[0].shape, dtype)],
    )
    return result


def _count(total, x, threshold):
    """``total`` + 1 where x ≥ threshold or x is NaN."""
    if interpreting():  # by keys, since a CPU may take subnormal values for zeros
        return total + (key_of(x) >= key_of(threshold)).astype(x.dtype)
    return _packed("count", x.dtype, total, x, threshold)


def _largest(x, y):
    """The larger of two values, NaN if one is."""
    if interpreting():
        return jnp.where(key_of(x) > key_of(y), x, y)
    return _packed("max", x.dtype, x, y)


def _smallest(x, y):
    """The smaller of two values, NaN if one is."""
    if interpreting():
        return jnp.where((key_of(x) < key_of(y)) & (y == y) | (x != x), x, y)
    return _packed("min", x.dtype, x, y)


def _add_counts(work_ref, reading: int, totals: list):
    """Adds this program's counts, at most 2¹⁶ - 1, to those of a reading.

    By bytes, of which those of ``LARGEST_GRID`` programs add up exactly as floats.
    """
    place = lax.broadcasted_iota(jnp.int32, (COUNTERS,), 0)
    values = jnp.zeros((COUNTERS,), jnp.float32)
    for i, total in enumerate(totals):
        for j, byte in enumerate((total & 255, total >> 8)):
            values = jnp.where(place == j * (COUNTERS // 2) + i, byte.astype(jnp.float32), values)
    triton.atomic_add(work_ref, (place + (BINS + reading * COUNTERS),), values)


def _counts(work_ref, reading: int, bracket: int) -> list:
    """The counts of a reading at the thresholds of a bracket."""
    steps = len(_steps(reading))
    at = BINS + reading * COUNTERS + bracket * steps
    lower, upper = ([work_ref[at + j + t].astype(jnp.int32) for t in range(steps)] for j in (0, COUNTERS // 2))
    return [low + (high << 8) for low, high in zip(lower, upper, strict=True)]


def _brackets(bracket_ref, work_ref, p: Survey, dtype):
    """The brackets of this reading, from those of the last one and what it counted."""
    found = []
    for i, need in enumerate(p.needs):
        low, high = bracket_ref[2 * i], bracket_ref[2 * i + 1]
        if before := p.reading:
            low, high = _narrowed(low, high, before - 1, _counts(work_ref, before - 1, i), need, dtype)
        found.append((low, high))
    return found


def survey_kernel(*refs, problem: Survey):
    """One reading of x.

    Refs: x [m, n]; the brackets [2 · ranks] before and ``work``; then the brackets of this reading, ``work``, in which
    this reading adds to counters of its own, and the largest and the smallest value of each row, float32 [m]. Without
    ranks x and the last two alone.
    """
    p, refs = problem, list(refs)
    x_ref = refs.pop(0)
    dtype, program = x_ref.dtype, pl.program_id(0)
    brackets = []
    if p.needs:
        before_ref, _ = refs.pop(0), refs.pop(0)
        bracket_ref, work_ref = refs.pop(0), refs.pop(0)
        brackets = _brackets(before_ref, work_ref, p, dtype)
        for i, bracket in enumerate(brackets):
            for j, key in enumerate(bracket):
                bracket_ref[2 * i + j] = key
    shape = (p.rows, p.cols)
    thresholds = [
        jnp.broadcast_to(float_of(_threshold(low, _shift(low, high), jnp.int32(t), dtype), dtype), shape)
        for low, high in brackets
        for t in _steps(p.reading)
    ]

    def read():
        first = program * (p.rows * p.groups)

        def tile(group, chunk):
            return x_ref[pl.ds(first + group * p.rows, p.rows), pl.ds(chunk * p.cols, p.cols)]

        def step(chunk, carry):
            counts, tops, bottoms = carry
            tiles = [tile(group, chunk) for group in range(p.groups)]
            for x in tiles:
                counts = tuple(_count(c, x, t) for c, t in zip(counts, thresholds, strict=True))
            tops = tuple(_largest(top, x) for top, x in zip(tops, tiles[: len(tops)], strict=True))
            bottoms = tuple(_smallest(bottom, x) for bottom, x in zip(bottoms, tiles[: len(bottoms)], strict=True))
            return counts, tops, bottoms

        counts = tuple(jnp.zeros(shape, dtype) for _ in thresholds)
        groups = p.groups if p.extremes else 0
        tops = tuple(jnp.full(shape, -np.inf, dtype) for _ in range(groups))
        bottoms = tuple(jnp.full(shape, np.inf, dtype) for _ in range(groups))
        carry = counts, tops, bottoms

        def steps(i, carry):  # several an iteration: counts are taken apart and packed again between iterations
            for j in range(p.unroll):
                carry = step(i * p.unroll + j, carry)
            return carry

        carry = lax.fori_loop(0, p.chunks // p.unroll, steps, carry)
        for chunk in range(p.chunks // p.unroll * p.unroll, p.chunks):
            carry = step(chunk, carry)
        counts, tops, bottoms = carry
        totals = []
        for even, odd in zip(counts[::2], counts[1::2], strict=True):
            both = jnp.sum(_integer(even) + (_integer(odd) << 16), dtype=jnp.int32)
            totals += [both & 0xFFFF, (both >> 16) & 0xFFFF]
        if totals:
            _add_counts(work_ref, p.reading, totals)
        for group, (top, bottom) in enumerate(zip(tops, bottoms, strict=True)):
            rows = pl.ds(first + group * p.rows, p.rows)
            top_ref, bottom_ref = refs
            top_ref[rows] = _row_largest(top)
            bottom_ref[rows] = _row_largest(-bottom)

    if p.reading:
        opened = jnp.bool_(False)
        for low, high in brackets:
            opened = opened | (low < high)
        pl.when(opened)(read)
    else:
        read()


def _integer(count):
    return count.astype(jnp.float32).astype(jnp.int32)


def _row_largest(x):
    """The largest float32 of each row; NaN, of either sign, is above all."""
    value = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(value, jnp.int32)
    bits = jnp.where(value != value, np.int32(0x7FC00000), bits)
    key = jnp.max(bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF)), axis=1)
    return lax.bitcast_convert_type(key ^ ((key >> 31) & np.int32(0x7FFFFFFF)), jnp.float32)


def finish_kernel(x_ref, bracket_ref, work_ref, bits_ref, *, problem: Survey, chunks: int, padding: int):
    """Bits of the values at the ranks of flat x, ``padding`` of whose values are -infinity and do not count.

    What brackets are still open it bisects, in one program and so slowly; most calls find both closed. Open are those
    of a tail too heavy for the readings, and those of infinity and NaN.
    """
    p, dtype = problem, x_ref.dtype
    n = chunks * TILE - padding
    for i, (low, high) in enumerate(_brackets(bracket_ref, work_ref, p, dtype)):
        place = n - p.needs[i] + padding

        def halve(bracket, place=place):
            low, high = bracket
            middle = (low + high) >> 1
            count = lax.fori_loop(
                0,
                chunks,
                lambda c, total: (
                    total + jnp.sum((key_of(x_ref[pl.ds(c * TILE, TILE)]) <= middle).astype(jnp.int32), dtype=jnp.int32)
                ),
                jnp.int32(0),
            )
            return jnp.where(count > place, low, middle + 1), jnp.where(count > place, middle, high)

        bits_ref[i] = bits_of_key(lax.while_loop(lambda b: b[0] < b[1], halve, (low, high))[0])

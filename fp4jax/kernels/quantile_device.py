"""Device side of the exact quantile (Pallas on Triton): how many values lie between 30 boundaries.

Triton has no counters in shared memory. A value becomes a word with one bit set, that of its bin, and words are added
bit by bit: ``slices[b]`` holds, for each of 31 bins, bit b of the count of one place of the tile. Adding three words
takes two operations for all bins at once.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

WINDOW = 15  # boundaries around each rank
BINS = 2 * WINDOW + 1
INNER = WINDOW - 1  # bins between the first and the last boundary around a rank
JOINED = 2 * WINDOW - 1  # the same, of both windows side by side
SLICES = 8
STEPS = 16  # words added at a time
LIMIT = 2**SLICES // STEPS - 1  # times this may happen before a count could overflow its slices

# Two keys of 16 bits are made and placed at a time. Places stand in the low five bits, and shifts that wrap read no
# others, so that the second key need not be cut off the first.
_PLACE_PAIR = """
{
.reg .b32 s, k, a, b;
prmt.b32 s, $2, 0, 0xBB99;
or.b32 s, s, 0x80008000;
xor.b32 k, $2, s;
max.u16x2 a, k, $3;
min.u16x2 a, a, $5;
max.u16x2 b, k, $7;
min.u16x2 b, b, $9;
add.u32 a, a, b;
sub.u32 a, a, $11;
shr.u32 a, a, $13;
shf.l.wrap.b32 $0, 0, 1, a;
shr.u32 a, a, 16;
shf.l.wrap.b32 $1, 0, 1, a;
}
"""


@dataclasses.dataclass(frozen=True)
class Reading:
    """Static side of ``count_kernel``: how the flat array of ``size`` values is cut up."""

    size: int
    tile: int
    repeats: int  # times that a program takes STEPS tiles
    bits: int  # of a value
    interpreted: bool

    @property
    def programs(self) -> int:
        """Programs that cover the array."""
        return -(-self.size // (self.repeats * STEPS * self.tile))

    @property
    def highest(self) -> np.uint32:
        """The largest key."""
        return np.uint32(2**self.bits - 1)


def key_of(x):
    """uint32 key in the order of the floats, in [0, 2¹⁶) or [0, 2³²)."""
    if x.dtype == jnp.float32:
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        return jnp.where(bits >> 31 == 1, ~bits, bits | np.uint32(0x80000000))
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return jnp.where(bits >> 15 == 1, bits ^ np.uint32(0xFFFF), bits | np.uint32(0x8000))


def float_of_key(key, dtype):
    """The float of a key of ``key_of``."""
    if dtype == jnp.float32:
        return lax.bitcast_convert_type(jnp.where(key >> 31 == 1, key ^ np.uint32(0x80000000), ~key), jnp.float32)
    bits = jnp.where(key >> 15 == 1, key ^ np.uint32(0x8000), key ^ np.uint32(0xFFFF))
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), dtype)


# --- where the boundaries stand ----------------------------------------------------------------------------------


def _shift(width, bins: int, most: int):
    """The smallest s, up to ``most``, for which ``bins`` bins of 2ˢ keys cover ``width`` + 1 keys."""
    shift = jnp.uint32(0)
    for s in range(most):
        shift = shift + (width >= np.uint32(bins << s)).astype(jnp.uint32)
    return shift


def _minus(a, b):
    return a - jnp.minimum(a, b)


def windows(brackets, highest: np.uint32):
    """(shift, origin 0, end 0, origin 1, end 1) of the two windows; boundary j of each stands at origin + j · 2^shift.

    Each begins a bin below its bracket. Windows that would overlap are laid side by side over both brackets.
    """
    (low0, high0), (low1, high1) = brackets
    most = 11 if highest == 0xFFFF else 28  # 30 bins of 2¹¹ still fit the 16 bits in which pairs are added
    shift = _shift(jnp.maximum(high0 - low0, high1 - low1), INNER, most)
    joined = _shift(high1 - low0, JOINED, most)
    bin_ = jnp.uint32(1) << shift
    apart = (_minus(low0, bin_) + jnp.minimum(np.uint32(WINDOW) << shift, highest - _minus(low0, bin_))) <= _minus(
        low1, bin_
    )
    shift = jnp.where(apart, shift, joined)
    bin_, span = jnp.uint32(1) << shift, np.uint32(WINDOW) << shift
    origin0 = _minus(low0, bin_)
    end0 = origin0 + jnp.minimum(span, highest - origin0)
    origin1 = jnp.where(apart, _minus(low1, bin_), end0)
    return shift, origin0, end0, origin1, origin1 + jnp.minimum(span, highest - origin1)


def narrowed(brackets, counts, ranks, highest: np.uint32, trusted):
    """The brackets [low, high] that are left once ``counts`` [32] of the bins of their windows are known.

    Brackets that are not ``trusted`` come from a sample, and the ranks may lie outside.
    """
    shift, origin0, _, origin1, _ = windows(brackets, highest)
    i = lax.broadcasted_iota(jnp.int32, (32, 32), 0)
    j = lax.broadcasted_iota(jnp.int32, (32, 32), 1)
    running = jnp.sum(jnp.where(i <= j, counts[:, None], 0), axis=0, dtype=jnp.int32)
    found = []
    for (low, high), rank in zip(brackets, ranks, strict=True):
        place = jnp.minimum(jnp.sum((running <= rank).astype(jnp.int32), dtype=jnp.int32), BINS - 1).astype(jnp.uint32)

        def boundary(j):
            """(key, whether there is such a key)."""
            first = j <= WINDOW
            origin = jnp.where(first, origin0, origin1)
            offset = jnp.where(first, j, j - np.uint32(WINDOW)) << shift
            return origin + jnp.minimum(offset, highest - origin), offset <= highest - origin

        start, _ = boundary(place)
        stop, exists = boundary(place + np.uint32(1))
        new_low = jnp.where(place == 0, jnp.uint32(0), start)
        new_high = jnp.where((place == BINS - 1) | ~exists, jnp.uint32(highest), stop - np.uint32(1))
        new_low = jnp.where(trusted, jnp.maximum(new_low, low), new_low)
        new_high = jnp.where(trusted, jnp.minimum(new_high, high), new_high)
        closed = (low == high) & trusted
        found.append((jnp.where(closed, low, new_low), jnp.where(closed, high, new_high)))
    return tuple(found)


# --- counting ----------------------------------------------------------------------------------------------------


def _one_hot(x, window, packed, reading: Reading):
    """1 << bin for each value, int32."""
    if reading.bits == 16 and not reading.interpreted:
        operands = [jnp.broadcast_to(scalar, x.shape) for scalar in packed]
        [word] = triton.elementwise_inline_asm(
            _PLACE_PAIR,
            args=[lax.bitcast_convert_type(x, jnp.int16), *operands],
            constraints="=r,=r,r" + 2 * len(packed) * ",r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.int32)],
        )
        return word
    shift, origin0, end0, origin1, end1 = window
    key = key_of(x)
    offset = jnp.minimum(jnp.maximum(key, origin0), end0) - origin0
    offset = offset + (jnp.minimum(jnp.maximum(key, origin1), end1) - origin1)
    return jnp.int32(1) << (offset >> shift).astype(jnp.int32)


def _packed(window):
    """The window's scalars twice in a word each, as _PLACE_PAIR takes them."""
    shift, origin0, end0, origin1, end1 = window
    # The sum of the origins may take 17 bits, so halves are added, not put side by side.
    twice = [(v + (v << 16)).astype(jnp.int32) for v in (origin0, end0, origin1, end1, origin0 + origin1)]
    return [*twice, shift.astype(jnp.int32)]


def _add3(a, b, c):
    """Bits and carries of a + b + c, place by place."""
    either = a ^ b
    return either ^ c, (a & b) | (either & c)


def _absorb(words, slices):
    """Adds STEPS = 16 words to the counts."""
    slices = list(slices)
    for b in range(4):
        carries = []
        for first, second in zip(words[::2], words[1::2], strict=True):
            slices[b], carry = _add3(slices[b], first, second)
            carries.append(carry)
        words = carries
    [carry] = words
    for b in range(4, SLICES):
        slices[b], carry = slices[b] ^ carry, slices[b] & carry
    return tuple(slices)


def _bytes_of(slices):
    """Turns 8 slices of 32 bits into 8 words of 4 bytes: byte q of word i is the count of bin 8 q + i."""
    words = list(slices)
    for distance, mask in ((4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        for i in range(8):
            if not i & distance:
                swap = ((words[i] >> distance) ^ words[i + distance]) & mask
                words[i + distance] = words[i + distance] ^ swap
                words[i] = words[i] ^ (swap << distance)
    return words


def count_kernel(index_ref, x_ref, rank_ref, previous_ref, counts_in_ref, state_ref, counts_ref, *, reading: Reading):
    """One reading: narrows the brackets by the counts of the reading before, then counts around them.

    Refs: number of the reading, int32; x [n]; ranks int32 [2]; the brackets of the reading before, uint32 [4]; counts
    int32 [32 · readings], of which those before this reading's are read and its own are added to, in place; the
    brackets [4]. Reads none of x where both brackets are closed.
    """
    del counts_in_ref  # the same memory as counts_ref
    p, i = reading, index_ref[...]
    guessed = ((previous_ref[0], previous_ref[1]), (previous_ref[2], previous_ref[3]))
    known = narrowed(
        guessed,
        counts_ref[pl.ds(32 * jnp.maximum(i - 1, 0), 32)],
        (rank_ref[0], rank_ref[1]),
        p.highest,
        trusted=i > 1,
    )
    brackets = tuple(
        tuple(jnp.where(i == 0, old, new) for old, new in zip(*pair, strict=True))
        for pair in zip(guessed, known, strict=True)
    )
    for at, value in enumerate((*brackets[0], *brackets[1])):
        state_ref[at] = value
    window = windows(brackets, p.highest)
    packed = _packed(window) if p.bits == 16 else None
    open_ = (brackets[0][0] < brackets[0][1]) | (brackets[1][0] < brackets[1][1])
    start = pl.program_id(0) * (p.repeats * STEPS * p.tile)
    whole = p.programs * p.repeats * STEPS * p.tile == p.size

    def word(at):
        """1 << bin of the values of a tile; past the end it is the last bin, which holds what sorts last."""
        if whole:
            return _one_hot(x_ref[pl.ds(at, p.tile)], window, packed, p)
        mask = at + lax.broadcasted_iota(jnp.int32, (p.tile,), 0) < p.size
        x = triton.load(x_ref.at[pl.ds(at, p.tile)], mask=mask, other=0)
        return jnp.where(mask, _one_hot(x, window, packed, p), np.int32(1 << (BINS - 1)))

    def step(repeat, slices):
        return _absorb([word(start + (repeat * STEPS + s) * p.tile) for s in range(STEPS)], slices)

    def count():
        slices = lax.fori_loop(0, p.repeats, step, (jnp.zeros((p.tile,), jnp.int32),) * SLICES)
        bins = lax.broadcasted_iota(jnp.int32, (32,), 0)
        counts = jnp.zeros((32,), jnp.int32)
        for word, slice_ in enumerate(_bytes_of(slices)):
            for byte in range(4):
                if 8 * byte + word < BINS:
                    total = jnp.sum((slice_ >> (8 * byte)) & 255, dtype=jnp.int32)
                    counts = counts + jnp.where(bins == 8 * byte + word, total, 0)
        triton.atomic_add(counts_ref, pl.ds(32 * i, 32), counts)

    pl.when(open_ | (i == 0))(count)

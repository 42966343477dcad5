"""Device side of stochastic rounding (Pallas on Triton): the noise of ``fp4jax.rounding``, element by element."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton

from fp4jax.kernels.device import interpreting
from fp4jax.rounding import NOISE_BITS

_TURNS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _threefry() -> str:
    """PTX of 24 bits of noise $0 for index $1 under the key $2, $3."""
    keys = ("$2", "$3", "k")
    lines = ["xor.b32 k, $2, $3", "xor.b32 k, k, 0x1BD11BDA", "add.u32 a, $2, 0", "add.u32 b, $1, $3"]
    for block in range(5):
        for turn in _TURNS[block % 2]:
            lines += ["add.u32 a, a, b", f"shf.l.wrap.b32 b, b, b, {turn}", "xor.b32 b, b, a"]
        lines += [f"add.u32 a, a, {keys[(block + 1) % 3]}", f"add.u32 b, b, {keys[(block + 2) % 3]}"]
        lines += [f"add.u32 b, b, {block + 1}"]
    lines += ["xor.b32 a, a, b", f"shr.u32 $0, a, {32 - NOISE_BITS}"]
    return "{\n.reg .b32 a, b, k;\n" + "".join(f"{line};\n" for line in lines) + "}\n"


THREEFRY = _threefry()


def noise_of(key0, key1, index):
    """24-bit noise as float32 for the element of linear ``index`` (uint32): Threefry 2x32 of the counter (0, index).

    This is how ``jax.random.bits`` draws, and so ``fp4jax.rounding.noise``. Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3", SC 2011. Compiled, it is one operation of assembly: Triton takes minutes and gigabytes over the 20
    rounds, whose operations it tries to repeat for every layout.
    """
    if not interpreting():
        operands = (index, *(jnp.broadcast_to(k, index.shape) for k in (key0, key1)))
        [noise] = triton.elementwise_inline_asm(
            THREEFRY,
            args=[operand.astype(jnp.int32) for operand in operands],
            constraints="=r,r,r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(index.shape, jnp.int32)],
        )
        return noise.astype(jnp.float32)
    keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    a, b = jnp.zeros_like(index) + keys[0], index + keys[1]
    for block in range(5):
        for turn in _TURNS[block % 2]:
            a = a + b
            b = ((b << turn) | (b >> (32 - turn))) ^ a
        a, b = a + keys[(block + 1) % 3], b + keys[(block + 2) % 3] + np.uint32(block + 1)
    return ((a ^ b) >> (32 - NOISE_BITS)).astype(jnp.int32).astype(jnp.float32)


def noise_tile(key_ref, row, col, shape, width: int, stride: int = 1):
    """A function that draws for the tile at ``row``, ``col`` of a matrix of ``width`` columns; None without a key.

    The tile holds every ``stride``-th row.
    """
    if key_ref is None:
        return None

    def draw():
        rows = lax.broadcasted_iota(jnp.int32, shape, 0) * stride + row
        index = rows * width + (lax.broadcasted_iota(jnp.int32, shape, 1) + col)
        return noise_of(key_ref[0], key_ref[1], index.astype(jnp.uint32))

    return draw

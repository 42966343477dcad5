"""On a GPU: XLA's code rounds as the design pins it, so the reference equals NumPy bit for bit there too."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import fp4jax
from fp4jax.dot.xla import quantize_activation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

FORMATS = (fp4jax.E2M1, fp4jax.E4M3, fp4jax.E5M2)
ALL_BFLOAT16 = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16)


def same(got, want) -> None:
    """Equal bits, but any NaN equals any other."""
    got, want = np.asarray(got).astype(np.float32), np.asarray(want).astype(np.float32)
    differ = (got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))
    where = np.argwhere(differ)
    assert not len(where), f"{len(where)} of {got.size} differ, the first at {where[0]}: {got[differ][0]}"


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_reciprocals_are_rounded_correctly_at_every_exponent(format):
    exponents = np.arange(4, 250, dtype=np.uint32)[:, None]
    mantissas = np.random.default_rng(0).integers(0, 2**23, 2000, dtype=np.uint32)
    amax = (exponents << 23 | mantissas).view(np.float32)
    amax = np.clip(amax, format.max * 2.0**-125, min(format.max * 2.0**126, 3.4e38)).astype(np.float32)
    scales = jax.jit(lambda a: fp4jax.AbsMax()(a, format))(amax)
    same(scales.reciprocal, np.float32(format.max) / amax)
    same(scales.scale, amax * np.float32(1 / format.max))


@pytest.mark.parametrize("format", FORMATS, ids=repr)
@pytest.mark.parametrize("shape", [(256, 256), (2**16, 1)], ids=str)
def test_quantize_equals_numpy_on_every_bfloat16(format, shape):
    x = ALL_BFLOAT16.reshape(shape)
    for ties in (fp4jax.NEAREST_EVEN, fp4jax.TIES_UP):
        spec = fp4jax.QuantSpec(format, rounding=ties)
        for function in (fp4jax.quantize, jax.jit(fp4jax.quantize, static_argnums=1, static_argnames="axis")):
            got, want = function(jnp.asarray(x), spec, axis=-1), oracle.quantize(x, spec, -1)
            same(got.scale, want.block_scale)
            same(got.values, np.nan_to_num(want.values, nan=0.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_carried_outliers_round_product_and_sum_apart(dtype):
    x = np.random.default_rng(1).standard_t(2, (512, 768)).astype(dtype)
    spec, occ = fp4jax.QuantSpec(fp4jax.E2M1), fp4jax.OCC(0.9)
    values, scales, _ = jax.jit(lambda x: quantize_activation(x, spec, (-1,), occ, None))(x)
    want = oracle.quantize_activation(x, spec, occ, -1)
    same(scales.scale, want.block_scale)
    same(values, want.values)

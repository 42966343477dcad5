"""What the trap tests share: functions compiled once a spec or recipe, which is why the tests use few shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp4jax
from fp4jax.recipes import RECIPES

F32 = np.float32
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
MATMUL = (((1,), (0,)), ((), ()))
E2M1_VECTOR = fp4jax.QuantSpec(fp4jax.E2M1)
STOCHASTIC_VECTOR = fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)
FORMATS = [fp4jax.E2M1, fp4jax.E1M2, fp4jax.E3M0, fp4jax.E4M3, fp4jax.E5M2]
RULES = (fp4jax.AbsMax(), *(fp4jax.PowerOfTwo(mode) for mode in ("floor", "ceil", "even", "rceil")), fp4jax.TwoLevel())

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
rules = pytest.mark.parametrize("rule", RULES, ids=str)
formats = pytest.mark.parametrize("fmt", FORMATS, ids=str)
every_recipe = pytest.mark.parametrize("name", RECIPES)


def there_and_back(x, spec, axis=-1, key=None):
    """Quantize, then dequantize."""
    return fp4jax.quantize(x, spec, axis=axis, key=key).dequantize(jnp.float32)


def same(eager, jitted):
    """Both, after checking that they are the same to the bit."""
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(t).astype(F32).view(np.uint32) for t in (a, b))
        np.testing.assert_array_equal(a, b, "jit differs from eager")
    return jitted


@functools.cache
def quantizer(spec):
    f = functools.partial(fp4jax.quantize, spec=spec, axis=-1)
    return f, jax.jit(f)


def quantized(x, spec):
    """(values, scale as stored, dequantized) in NumPy; eager and jit must agree to the bit."""
    q = same(*(f(x) for f in quantizer(spec)))
    return np.asarray(q.values).astype(F32), np.asarray(q.scale), np.asarray(q.dequantize(jnp.float32))


def dot(recipe, dims=MATMUL):
    return lambda lhs, rhs: fp4jax.dot_general(lhs, rhs, dims, recipe=recipe)


def with_gradients(f, lhs, rhs, dy):
    y, vjp = jax.vjp(f, lhs, rhs)
    return (y, *vjp(dy.astype(y.dtype)))


@functools.cache
def product(name):
    """Compiled (y, dx, dw) of a recipe at the defaults of its knobs."""
    return jax.jit(functools.partial(with_gradients, dot(RECIPES[name]())))


def normal(seed, *shape, dtype=F32, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), dtype)


def mesh_of_eight():
    return jax.make_mesh((8,), ("d",))


def on_devices(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def uniform_recipe(spec):
    """``spec`` on every operand of every product."""
    gemm = fp4jax.Gemm(spec, spec)
    return fp4jax.Recipe("uniform", fprop=gemm, dgrad=gemm, wgrad=gemm)

"""The "hopper" backend: its thresholds, and what it refuses.

``tests/test_conformance_dot.py`` compares it with the NumPy model, ``tests/dot/test_hopper.py`` tests it on meshes.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import kernels
from fp4jax.dot import hopper_operands
from fp4jax.outliers import thresholds

recipes = fp4jax.recipes


def test_exact_thresholds_are_those_of_the_xla_backend():
    x = np.random.default_rng(0).standard_t(1, (12, 101))
    x[::2] = 0.5  # many equal values
    x = jnp.asarray(x, jnp.float32).astype(jnp.bfloat16)
    occ = fp4jax.OCC(0.99)
    with kernels.interpret():
        got = hopper_operands.thresholds(x, occ, ())
    for value, want in zip(got, thresholds(x, occ, (-1,)), strict=True):
        assert value.shape == ()
        assert value.dtype == want.dtype
        assert value == want.reshape(())


def test_what_it_does_not_support_is_listed():
    x, w = jnp.ones((4, 8), jnp.float32), jnp.ones((8, 2), jnp.float32)
    dims = (((1,), (0,)), ((), ()))
    with pytest.raises(
        ValueError, match=r"backend='hopper' does not support recipe 'fp4'.*the device is no H100 or H200"
    ):
        fp4jax.dot_general(x, w, dims, recipe=recipes.fp4(), backend="hopper")
    cases = {
        r"fprop.lhs: granularity PerBlock\(size=16\)": recipes.fp4_vector(activation=fp4jax.PerBlock(16)),
        "dgrad.lhs=None": recipes.fp4(gradient=None),
        r"outliers=OCC\(.*scope='vector'": recipes.fp4(scope="vector"),
    }
    with kernels.interpret():
        for reason, recipe in cases.items():
            with pytest.raises(ValueError, match=reason):
                fp4jax.dot_general(x, w, dims, recipe=recipe, backend="hopper")
        with pytest.raises(ValueError, match="lhs is not contracted along its last axes"):
            fp4jax.dot_general(x.T, w, (((0,), (0,)), ((), ())), recipe=recipes.fp4(), backend="hopper")
        with pytest.raises(ValueError, match="batch axes"):
            fp4jax.dot_general(x[None], w[None], (((2,), (1,)), ((0,), (0,))), recipe=recipes.fp4(), backend="hopper")

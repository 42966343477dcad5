"""The exact quantile, interpreted on the CPU, against sorting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax import kernels
from fp4jax.kernels import order_statistics, quantile


def check(x, alpha) -> None:
    n = x.size
    ranks = int((1 - alpha) * n), min(int(alpha * n), n - 1)
    with kernels.interpret():
        got = jax.jit(lambda x: order_statistics(x, ranks))(x)
    ordered = np.sort(np.asarray(x).ravel())
    assert [v.dtype for v in got] == [x.dtype] * 2
    assert [float(v) for v in got] == [float(ordered[r]) for r in ranks]


def test_one_value():
    check(jnp.full((1, 1), -2.5, jnp.float16), 0.99)


def test_a_sample_that_misleads_costs_time_but_no_correctness(monkeypatch):
    monkeypatch.setattr(quantile, "SAMPLES", 64)
    x = np.sort(np.random.default_rng(1).standard_normal(20011))
    stride = -(-x.size // 64) | 1
    x[::stride] = 100  # all that the sample sees
    check(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16), 0.9)


def test_errors():
    with pytest.raises(TypeError, match="x has dtype int32; the exact quantile takes bfloat16, float16 or float32"):
        order_statistics(jnp.zeros(8, jnp.int32), (0, 7))
    with pytest.raises(ValueError, match=r"ranks=\(0, 8\) must be two positions in the 8 values of x"):
        order_statistics(jnp.zeros(8, jnp.bfloat16), (0, 8))


def test_float32_is_counted_by_the_reference():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((40, 7)), jnp.float32)
    ordered = np.sort(np.asarray(x).reshape(-1))
    low, high = order_statistics(x, (2, 277))
    assert (low, high) == (ordered[2], ordered[277])
    assert low.dtype == jnp.float32

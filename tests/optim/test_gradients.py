"""Gradients in FP8: against ml_dtypes' own cast, and the gain over many steps."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp4jax
from fp4jax import optim

NUMPY = {"float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448.0), "float8_e5m2": (ml_dtypes.float8_e5m2, 57344.0)}


def cast_once(gradients, **kwargs):
    tx = optim.cast_gradients(**kwargs)
    return tx.update(gradients, tx.init(gradients))


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("given", ["float32", "bfloat16", "float16"])
def test_equals_a_cast_by_ml_dtypes(dtype, given):
    g = jnp.asarray(np.random.default_rng(0).normal(size=(7, 11)), given)
    u, _ = cast_once(g, dtype=dtype)
    narrow, largest = NUMPY[dtype]
    x = np.asarray(g, np.float32)
    amax = np.abs(x).max()
    values = (x * (np.float32(largest) / amax)).astype(narrow).astype(np.float32)
    np.testing.assert_array_equal(u, values * (amax * np.float32(1 / largest)))
    assert u.dtype == jnp.float32


@pytest.mark.parametrize("dtype", NUMPY)
def test_large_and_small_leaves_of_one_tree_survive(dtype):
    gradients = {"small": jnp.full(5, 1e-7), "large": jnp.array([1e4, -5e3, 1e2])}
    u, _ = cast_once(gradients, dtype=dtype)
    for name, g in gradients.items():
        np.testing.assert_allclose(u[name], g, rtol=2.0**-3)


def test_stochastic_rounding_is_unbiased_and_differs_by_step():
    g = jnp.full(2**14, 1.06).at[0].set(448.0)
    tx = optim.cast_gradients(stochastic=True)
    state = tx.init(g)
    first, state = tx.update(g, state)
    second, _ = tx.update(g, state)
    draws = np.asarray(first)[1:]
    assert set(draws.tolist()) == {1.0, 1.125}
    assert abs(draws.mean() - 1.06) < 5 * 0.0625 / np.sqrt(draws.size)
    assert not np.array_equal(first, second)
    nearest, _ = cast_once(g)
    assert set(np.asarray(nearest)[1:].tolist()) == {1.0}


def gains(tx, gradients, steps, state=None):
    update = jax.jit(lambda s, _: (lambda u, s: (s, s.gain))(*tx.update(gradients, s)))
    return jax.lax.scan(update, tx.init(gradients) if state is None else state, length=steps)


def test_the_gain_halves_on_saturation_and_recovers_over_the_window():
    """Two values at the top of four: raised by half a step they saturate, which is more than .001 %."""
    g = jnp.array([448.0, 448.0, 3.0, 0.0])
    tx = optim.cast_gradients(window=1000)
    _, gain = gains(tx, g, 2600)
    gain = np.asarray(gain)
    np.testing.assert_allclose(gain[49], 2 ** (50 / 1000), rtol=1e-5)
    halved = np.flatnonzero(np.diff(gain) < 0)
    np.testing.assert_allclose(gain[halved + 1], gain[halved] / 2)
    # 464 is where E4M3 rounds past 448, and a halved gain takes a whole window to come back.
    np.testing.assert_allclose(gain[halved], 464 / 448, rtol=1e-3)
    np.testing.assert_allclose(np.diff(halved), 1000, atol=2)
    assert len(halved) == 3


def test_a_few_outliers_may_saturate_but_never_most_of_what_is_not_zero():
    """One outlier in 200,000 values is clipped in time; where only ten are not zero, none of them is."""
    tx = optim.cast_gradients(window=1)  # doubles each step, to see the end soon
    rest = jnp.ones(200_000).at[0].set(1e4)
    _, gain = gains(tx, rest, 12)
    assert 2**9 <= gain[-1] <= 2**14
    sparse = jnp.zeros(200_000).at[:10].set(jnp.arange(1.0, 11.0))
    _, gain = gains(tx, sparse, 12)
    assert np.max(np.asarray(gain)) <= 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_leaf_that_is_not_finite_becomes_nan_and_keeps_its_gain(bad):
    gradients = {"bad": jnp.array([1.0, bad, 0.0]), "good": jnp.array([1.0, 2.0])}
    u, state = cast_once(gradients)
    assert np.isnan(np.asarray(u["bad"])).all()
    assert state.gain["bad"] == 1
    np.testing.assert_array_equal(u["good"], gradients["good"])


def test_zeros_keep_their_gain():
    u, state = cast_once(jnp.zeros(3))
    assert not np.any(np.asarray(u))
    assert state.gain == 1


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="dtype='float16' is not supported; use one of float8_e4m3fn, float8_e5m2"):
        optim.cast_gradients("float16")
    with pytest.raises(ValueError, match="dtype=E2M1 is not supported"):
        optim.cast_gradients(fp4jax.E2M1)

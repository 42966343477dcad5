"""Rules of rounding, beyond what the conformance suite compares with the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax.formats import FORMATS
from fp4jax.rounding import ROUNDINGS, position

SIGNED = [f for f in FORMATS.values() if f.signed]
rules = pytest.mark.parametrize("rule", ROUNDINGS.values(), ids=str)
formats = pytest.mark.parametrize("fmt", SIGNED, ids=str)
KEY = jax.random.key(7)


@rules
@formats
def test_results_lie_on_the_grid_and_neighbor_their_input(rule, fmt):
    u = jnp.asarray(np.random.default_rng(0).normal(size=4096) * fmt.max / 2, jnp.float32)
    v = np.asarray(rule(u, fmt, KEY))
    assert np.isin(v, fmt.grid).all()
    clipped = np.clip(u, -fmt.max, fmt.max)
    below = fmt.grid[np.searchsorted(fmt.grid, clipped, side="right") - 1]
    above = fmt.grid[np.searchsorted(fmt.grid, clipped, side="left")]
    assert ((v == below) | (v == above)).all()


@rules
@formats
def test_grid_values_stay_and_nan_passes(rule, fmt):
    np.testing.assert_array_equal(rule(jnp.asarray(fmt.grid), fmt, KEY), fmt.grid)
    v = rule(jnp.asarray([np.inf, -np.inf, np.nan], jnp.float32), fmt, KEY)
    assert v[:2].tolist() == [fmt.max, -fmt.max]
    assert np.isnan(v[2])


@rules
def test_a_zero_keeps_the_sign_of_its_input(rule):
    signs = np.signbit(rule(jnp.asarray([-0.0, 0.0, -1e-6, 1e-6], jnp.float32), fp4jax.E2M1, KEY))
    assert signs.tolist() == [True, False, True, False]


def test_ties_up_is_the_table_of_the_paper():
    table = np.array([-5, -3.5, -2.5, -1.75, -1.25, -0.75, -0.25, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    u = np.concatenate([table, np.nextafter(table, -9), np.nextafter(table, 9), np.linspace(-7, 7, 301)])
    expected = fp4jax.E2M1.grid[np.searchsorted(table, u.astype(np.float32), side="right")]
    np.testing.assert_array_equal(fp4jax.TIES_UP(jnp.asarray(u, jnp.float32), fp4jax.E2M1), expected)


@formats
def test_stochastic_rounding_is_unbiased(fmt):
    u = jnp.asarray(np.linspace(-fmt.max, fmt.max, 37), jnp.float32)
    draws = np.asarray(fp4jax.STOCHASTIC(jnp.broadcast_to(u, (20_000, 37)), fmt, KEY), np.float64)
    error = draws.mean(0) - np.asarray(u)
    assert (np.abs(error) <= 4.5 * draws.std(0) / np.sqrt(20_000) + 1e-12).all()


def test_noise_depends_on_key_and_index_alone():
    u = jnp.full((64, 8), 0.3)
    first = fp4jax.STOCHASTIC(u, fp4jax.E2M1, KEY)
    np.testing.assert_array_equal(first, jax.jit(fp4jax.STOCHASTIC, static_argnums=1)(u, fp4jax.E2M1, KEY))
    np.testing.assert_array_equal(first, fp4jax.STOCHASTIC(u * 1.0, fp4jax.E2M1, jax.random.key_data(KEY)))
    assert (first != fp4jax.STOCHASTIC(u, fp4jax.E2M1, jax.random.key(8))).any()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(u, jax.NamedSharding(mesh, jax.P("data")))
    np.testing.assert_array_equal(first, jax.jit(fp4jax.STOCHASTIC, static_argnums=1)(sharded, fp4jax.E2M1, KEY))


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_of_a_vmap_without_keys_draw_differently(depth):
    f = lambda u: fp4jax.STOCHASTIC(u, fp4jax.E2M1, KEY)
    for _ in range(depth):
        f = jax.vmap(f)
    rows = np.asarray(f(jnp.full((4,) * depth + (64,), 0.3))).reshape(-1, 64)
    assert len({row.tobytes() for row in rows}) == len(rows)


def test_rows_of_a_vmap_over_keys_draw_what_their_key_says():
    keys = jax.random.split(KEY, 3)
    u = jnp.full((3, 64), 0.3)
    together = jax.vmap(lambda u, k: fp4jax.STOCHASTIC(u, fp4jax.E2M1, k))(u, keys)
    for row, one, key in zip(together, u, keys, strict=True):
        np.testing.assert_array_equal(row, fp4jax.STOCHASTIC(one, fp4jax.E2M1, key))


def test_stochastic_without_a_key_says_what_to_pass():
    with pytest.raises(ValueError, match=r"rounding=STOCHASTIC draws noise and key=None; pass key=jax.random.key"):
        fp4jax.STOCHASTIC(jnp.ones(3), fp4jax.E2M1)


def test_several_keys_are_refused():
    with pytest.raises(ValueError, match=r"key has shape \(3,\); pass one key"):
        fp4jax.STOCHASTIC(jnp.ones(3), fp4jax.E2M1, jax.random.split(KEY, 3))


def test_position_is_zero_on_the_grid_and_half_at_midpoints():
    for fmt in SIGNED:
        middle = (fmt.grid[1:] + fmt.grid[:-1]) / 2
        assert (position(jnp.asarray(fmt.grid), fmt) == 0).all()
        assert (position(jnp.asarray(middle), fmt) == 0.5).all()
        assert (position(jnp.asarray([2 * fmt.max, -2 * fmt.max]), fmt) == 0).all()

"""Schedule, weight decay and clipping of the optimizer a run is given."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fp4jax.models import MODELS, Llama
from fp4jax.train.config import OptimizerOptions, Settings
from fp4jax.train.errors import ConfigError
from fp4jax.train.optimizer import OPTIMIZERS, decay_mask, make_optimizer, make_schedule
from fp4jax.train.step import Architecture

OPTIONS = OptimizerOptions(learning_rate=1e-3)


def llama_parameters():
    return jax.eval_shape(Architecture(lambda rngs: Llama(MODELS["tiny"], rngs=rngs)).init, jnp.uint32(0))[0]


def test_the_schedule_warms_up_and_ends_at_a_tenth():
    schedule = make_schedule(OPTIONS, steps=1000)
    rates = np.array([float(schedule(step)) for step in range(1000)])
    assert rates[0] == pytest.approx(1e-3 / 50, rel=1e-5)  # 5 % of the steps, and the first one moves
    assert rates.argmax() == 50
    assert rates.max() == pytest.approx(1e-3)
    assert rates[525] == pytest.approx((1e-3 + 1e-4) / 2, rel=1e-3)  # halfway down the cosine
    assert rates[-1] == pytest.approx(1e-4, rel=1e-3)
    assert np.all(np.diff(rates[:51]) > 0)
    assert np.all(np.diff(rates[50:]) < 0)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_shortest_runs_have_a_schedule(steps):
    schedule = make_schedule(dataclasses.replace(OPTIONS, warmup=0.9), steps)
    assert all(0 < float(schedule(step)) <= 1e-3 * (1 + 1e-6) for step in range(steps))


def test_no_warmup_starts_at_the_peak():
    assert float(make_schedule(dataclasses.replace(OPTIONS, warmup=0.0), 100)(0)) == pytest.approx(1e-3)


def test_decay_touches_matrices_but_no_norm():
    mask = jax.tree_util.tree_leaves_with_path(decay_mask(llama_parameters()))
    decayed = {jax.tree_util.keystr(path, simple=True, separator=".") for path, yes in mask if yes}
    kept = {jax.tree_util.keystr(path, simple=True, separator=".") for path, yes in mask if not yes}
    assert kept == {"layers.attention_norm.scale", "layers.mlp_norm.scale", "norm.scale"}
    assert {"embed.embedding", "head.kernel", "layers.mlp.up.kernel"} <= decayed


def test_zero_gradients_only_decay():
    """p ← p − lr · decay · p where decayed; exactly p elsewhere."""
    optimizer = make_optimizer(dataclasses.replace(OPTIONS, warmup=0.0), steps=10)
    params = {"mlp": {"kernel": jnp.full((2, 2), 2.0)}, "norm": {"scale": jnp.ones(3)}}
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    after = optax.apply_updates(params, updates)
    np.testing.assert_allclose(after["mlp"]["kernel"], 2.0 * (1 - 1e-3 * 0.1), rtol=1e-6)
    assert np.array_equal(after["norm"]["scale"], params["norm"]["scale"])


def test_updates_are_those_of_adamw_by_hand():
    """Three steps against Loshchilov & Hutter's equations in float64, the second with a gradient that is clipped."""
    options = dataclasses.replace(OPTIONS, warmup=0.0)
    optimizer, schedule = make_optimizer(options, steps=5), make_schedule(options, steps=5)
    params = {"kernel": jnp.array([0.5, -2.0])}
    state = optimizer.init(params)
    p, m, v = np.array([0.5, -2.0]), np.zeros(2), np.zeros(2)
    for t, gradient in enumerate(([0.3, -0.4], [30.0, -40.0], [0.0, 0.1])):
        updates, state = optimizer.update({"kernel": jnp.array(gradient)}, state, params)
        params = optax.apply_updates(params, updates)
        g = np.array(gradient) / max(1.0, np.linalg.norm(gradient))
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        step = m / (1 - 0.9 ** (t + 1)) / (np.sqrt(v / (1 - 0.95 ** (t + 1))) + 1e-8) + 0.1 * p
        p = p - float(schedule(t)) * step
        np.testing.assert_allclose(params["kernel"], p, rtol=2e-6)


def test_a_clip_norm_of_zero_clips_nothing():
    optimizer = make_optimizer(dataclasses.replace(OPTIONS, clip_norm=0.0, b1=0.0, weight_decay=0.0), steps=10)
    params = {"kernel": jnp.zeros(1)}
    _, state = optimizer.update({"kernel": jnp.array([1e4])}, optimizer.init(params), params)
    second_moment = max(float(leaf[0]) for leaf in jax.tree.leaves(state) if leaf.shape == (1,))
    assert second_moment == pytest.approx(0.05 * 1e8, rel=1e-6)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_optimizer_takes_the_model_and_keeps_its_state(name):
    """Conformance: float32 updates, a state whose shapes and dtypes never change."""
    options = Settings(optimizer=OptimizerOptions(optimizer=name)).resolved().optimizer
    optimizer, params = make_optimizer(options, steps=10), llama_parameters()
    state = jax.eval_shape(optimizer.init, params)
    updates, after = jax.eval_shape(optimizer.update, params, state, params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("float32")}


def test_an_unknown_optimizer_lists_what_exists():
    with pytest.raises(
        ConfigError, match=r"optimizer 'adam' is unknown; choose from adamw.* \(did you mean 'adamw'\?\)"
    ):
        make_optimizer(dataclasses.replace(OPTIONS, optimizer="adam"), steps=10)


def test_an_unresolved_learning_rate_says_where_to_get_one():
    with pytest.raises(ConfigError, match=r"learning_rate=None: give one, or take it from a preset"):
        make_schedule(OptimizerOptions(), steps=10)


def test_master_weights_are_plain_float32_arrays():
    params, noise = Architecture(lambda rngs: Llama(MODELS["tiny"], rngs=rngs)).init(0)
    assert not any(isinstance(leaf, nnx.Variable) for leaf in jax.tree.leaves(params))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert noise == {}

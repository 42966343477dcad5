"""``adamw`` as a whole: its arguments, its clipping, and what it is made of."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp4jax import optim

PLAIN = {"mu_dtype": "float32", "nu_dtype": "float32", "grad_dtype": None}


def test_names_order_and_defaults_are_those_of_optax():
    ours, theirs = (inspect.signature(f).parameters for f in (optim.adamw, optax.adamw))
    assert list(ours)[: len(theirs) - 1] == list(theirs)[:-1]  # nesterov, the last of Optax, takes a keyword in both
    for name in theirs:
        if name != "mu_dtype":
            assert ours[name].default == theirs[name].default
            assert ours[name].kind == theirs[name].kind


@pytest.mark.parametrize("learning_rate", [0.1, optax.linear_schedule(0.0, 0.1, 5)], ids=["number", "schedule"])
def test_in_float32_it_is_optax_adamw(learning_rate):
    """With float32 moments and gradients as they are: bit for bit, decoupled decay under a mask included."""
    params = {"w": jnp.linspace(-1, 1, 12).reshape(3, 4), "b": jnp.ones(4)}
    mask = {"w": True, "b": False}
    ours = optim.adamw(learning_rate, 0.8, 0.95, 1e-6, weight_decay=0.3, mask=mask, nesterov=True, **PLAIN)
    theirs = optax.adamw(learning_rate, 0.8, 0.95, 1e-6, weight_decay=0.3, mask=mask, nesterov=True)
    p, q, s, t = params, params, ours.init(params), theirs.init(params)
    for i in range(3):
        g = jax.tree.map(lambda x, i=i: jnp.cos(x + i), params)
        u, s = ours.update(g, s, p)
        v, t = theirs.update(g, t, q)
        p, q = optim.apply_updates(p, u), optax.apply_updates(q, v)
        for name in params:
            np.testing.assert_array_equal(p[name], q[name])


@pytest.mark.parametrize("size", [0.0, 1e-3, 5.0])
def test_clipping_is_that_of_optax(size):
    params = {"w": jnp.ones((3, 4)), "b": jnp.ones(())}
    g = jax.tree.map(lambda p: size * jnp.sin(1 + jnp.arange(p.size, dtype=jnp.float32)).reshape(p.shape), params)
    ours = optim.adamw(0.1, clip_norm=1.0, **PLAIN)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    u, _ = ours.update(g, ours.init(params), params)
    v, _ = theirs.update(g, theirs.init(params), params)
    for name in params:
        np.testing.assert_allclose(u[name], v[name], rtol=1e-6)


def test_a_norm_that_overflows_skips_the_step():
    params = {"w": jnp.ones(3)}
    tx = optim.adamw(0.1, clip_norm=1.0)
    updates, state = tx.update({"w": jnp.full(3, 1e20)}, tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], 0)
    assert state.skipped == 1


def test_the_norm_counts_all_parts_of_a_split_gradient():
    """On eight devices, each with an eighth of w and the whole of b: every part is clipped by the norm of the whole."""
    mesh = jax.make_mesh((8,), ("data",))
    params = {"w": jnp.ones(16), "b": jnp.ones(3)}
    g = {"w": jnp.arange(16.0), "b": jnp.array([3.0, 0.0, -4.0])}
    tx = optim.adamw(0.1, eps=10.0, weight_decay=0.0, clip_norm=1.0, **PLAIN)  # eps this large lets the norm show
    specs = {"w": P("data"), "b": P()}
    put = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), g, specs)

    def first_update(g):
        ones = jax.tree.map(jnp.ones_like, g)
        return tx.update(g, tx.init(ones), ones)[0]

    split = jax.jit(jax.shard_map(first_update, mesh=mesh, in_specs=(specs,), out_specs=specs))(put)
    whole, _ = tx.update(g, tx.init(params), params)
    for name in params:
        np.testing.assert_allclose(split[name], whole[name], rtol=1e-6)


def test_none_passes_through_apply_updates():
    params = {"w": jnp.ones(2), "frozen": None}
    assert optim.apply_updates(params, {"w": jnp.ones(2), "frozen": None})["frozen"] is None

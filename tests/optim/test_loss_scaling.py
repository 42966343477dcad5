"""Dynamic loss scaling: what it skips, what a skipped step leaves alone, and that devices agree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp4jax import optim
from fp4jax.optim.loss_scaling import all_finite


def bits(tree):
    return [(np.asarray(x).tobytes(), x.dtype) for x in jax.tree.leaves(tree)]


def warmed_up(tx, params):
    """The optimizer after two ordinary steps, so that no part of its state is zero."""
    state = tx.init(params)
    step = jax.jit(lambda p, s, g: (lambda u, s: (optim.apply_updates(p, u), s))(*tx.update(g, s, p)))
    for size in (1.0, -0.5):
        params, state = step(params, state, jax.tree.map(lambda p, size=size: jnp.full(p.shape, size * 64), params))
    return step, params, state


def test_twenty_bad_steps_in_a_row_change_the_scale_and_the_counters_only():
    """Trap 55: infinity of either sign, and NaN."""
    params = {"w": jnp.linspace(-1, 1, 12, dtype=jnp.bfloat16).reshape(3, 4), "b": jnp.ones(3)}
    tx = optim.adamw(0.1, loss_scale=64.0, master_dtype="float16")
    step, params, state = warmed_up(tx, params)
    before, kept = params, state.inner_state
    scales = []
    for i in range(20):
        bad = (np.inf, -np.inf, np.nan)[i % 3]
        gradients = {"w": jnp.ones((3, 4)).at[1, 2].set(bad), "b": jnp.ones(3)}
        params, state = step(params, state, gradients)
        scales.append(float(state.loss_scale))
    assert bits(params) == bits(before)
    assert bits(state.inner_state) == bits(kept)
    assert scales == [max(64.0 / 2**i, 1.0) for i in range(1, 21)]
    assert (state.skipped, state.skipped_in_a_row, state.good_steps) == (20, 20, 0)

    params, state = step(params, state, jax.tree.map(jnp.ones_like, gradients))
    assert bits(params) != bits(before)
    assert (state.skipped, state.skipped_in_a_row, state.good_steps, state.loss_scale) == (20, 0, 1, 1.0)


def test_the_scale_grows_after_an_interval_and_stops_at_the_top():
    tx = optim.dynamic_loss_scaling(optax.sgd(1.0), 4.0, growth_interval=3, max_scale=8.0)
    state, scales = tx.init(jnp.zeros(2)), []
    for _ in range(10):
        updates, state = tx.update(jnp.full(2, 4.0), state)
        scales.append(float(state.loss_scale))
    assert scales == [4, 4, 8, 8, 8, 8, 8, 8, 8, 8]
    np.testing.assert_array_equal(updates, -0.5)  # unscaled by 8


def test_scaled_gradients_give_the_updates_of_unscaled_ones():
    """The scale is a power of two, so that multiplying and dividing is exact."""
    params = {"w": jnp.linspace(-1, 1, 7)}
    tx = optim.adamw(0.1, loss_scale=2.0**10)
    state = tx.init(params)
    slope = jax.grad(lambda p: jnp.sum(p["w"] ** 3) * optim.loss_scale(state))(params)
    plain = optim.adamw(0.1)
    updates, _ = tx.update(slope, state, params)
    expected, _ = plain.update(jax.grad(lambda p: jnp.sum(p["w"] ** 3))(params), plain.init(params), params)
    np.testing.assert_array_equal(updates["w"], expected["w"])


def test_the_scale_is_found_anywhere_and_is_one_without_loss_scaling():
    params = jnp.ones(2)
    chained = optax.chain(optax.clip(1.0), optim.dynamic_loss_scaling(optax.sgd(0.1), 32.0))
    assert optim.loss_scale(chained.init(params)) == 32
    assert optim.loss_scale(optax.adamw(0.1).init(params)) == 1


def test_updates_and_states_that_are_not_finite_are_refused_too():
    """Finite gradients whose square overflows would leave v infinite; an update of 1/0 would reach the weights."""
    overflowing = optim.dynamic_loss_scaling(optax.adam(0.1), 1.0)
    state = overflowing.init(jnp.ones(2))
    updates, after = overflowing.update(jnp.array([1e25, 1.0]), state)
    np.testing.assert_array_equal(updates, 0)
    assert bits(after.inner_state) == bits(state.inner_state)

    dividing = optim.dynamic_loss_scaling(optax.stateless(lambda u, p: jax.tree.map(lambda x: 1 / x, u)), 1.0)
    updates, after = dividing.update(jnp.array([0.0, 1.0]), dividing.init(jnp.ones(2)))
    np.testing.assert_array_equal(updates, 0)
    assert after.skipped == 1

    # A scale in E8M0 is NaN by its code alone.
    assert all_finite({"x": jnp.ones(2).astype(jnp.float8_e8m0fnu), "n": jnp.arange(2)})
    assert not all_finite({"x": jnp.full(2, np.nan).astype(jnp.float8_e8m0fnu)})


def test_around_an_accumulator_a_bad_micro_step_costs_itself_only():
    accumulated = optax.MultiSteps(optim.adamw(0.1), 2).gradient_transformation()
    tx = optim.dynamic_loss_scaling(accumulated, 1.0)
    params = {"w": jnp.ones(3)}
    state, moved = tx.init(params), []
    update = jax.jit(tx.update)
    for size in (1.0, np.nan, 1.0, 1.0, 1.0):
        updates, state = update({"w": jnp.full(3, size)}, state, params)
        moved.append(bool(jnp.any(updates["w"] != 0)))
    assert moved == [False, False, True, False, True]


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_bad_device_makes_all_skip_in_shard_map(check_vma):
    """Optimizer state split over eight devices (ZeRO): NaN in the part of one. Else the parts step as the whole."""
    mesh = jax.make_mesh((8,), ("data",))
    axis_name = None if check_vma else "data"
    tx = optim.adamw(0.1, axis_name=axis_name)
    params = {"w": jnp.linspace(-1, 1, 32)}
    parts = jax.tree.map(lambda x: P() if x.size == 1 else P("data"), jax.eval_shape(tx.init, params))

    def init(w):
        return tx.init({"w": w})

    def step(w, state, g, tx=tx):
        updates, state = tx.update({"w": g}, state, {"w": w})
        return optim.apply_updates({"w": w}, updates)["w"], state

    over = {"mesh": mesh, "check_vma": check_vma}
    split = NamedSharding(mesh, P("data"))
    w = jax.device_put(params["w"], split)
    state = jax.jit(jax.shard_map(init, in_specs=P("data"), out_specs=parts, **over))(w)
    sharded = jax.jit(jax.shard_map(step, in_specs=(P("data"), parts, P("data")), out_specs=(P("data"), parts), **over))

    good = jnp.sin(jnp.arange(32.0))
    stepped, after = sharded(w, state, jax.device_put(good, split))
    alone, alone_after = step(params["w"], optim.adamw(0.1).init(params), good, optim.adamw(0.1))
    np.testing.assert_allclose(stepped, alone, rtol=1e-6)
    for moment in ("mu_scale", "nu_scale"):  # one scale over all parts
        np.testing.assert_array_equal(optax.tree.get(after, moment)["w"], optax.tree.get(alone_after, moment)["w"])

    skipped, after = sharded(w, state, jax.device_put(good.at[13].set(np.nan), split))
    np.testing.assert_array_equal(skipped, params["w"])
    assert bits(after.inner_state) == bits(state.inner_state)
    assert after.skipped == 1

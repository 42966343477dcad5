"""What any Optax transformation must do, over every row of ours and some of Optax's own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rows import OURS, STOCK

from fp4jax import optim
from fp4jax.optim.storage import is_quantized

ROWS = [pytest.param(row, id=row.name) for row in OURS + STOCK]


def example(dtype, **more):
    """A parameter of an odd shape (and ``more``), and gradients that differ by step."""
    rng = np.random.default_rng(0)
    shapes = {"kernel": (3, 5), **more}

    def draw():
        return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}

    return draw(), [draw() for _ in range(3)]


def abstract(tree):
    return jax.eval_shape(lambda: tree)


def same_bits(a, b):
    """Whether two trees hold the same numbers, NaN and signs of zero included."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes() and x.dtype == y.dtype
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def make_step(tx):
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optim.apply_updates(params, updates), state

    return step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("row", ROWS)
def test_shapes_and_dtypes_never_drift(row, dtype):
    tx = row()
    params, gradients = example(dtype, empty=(0, 2), bias=(7,), scalar=())
    state = jax.eval_shape(tx.init, params)
    for _ in range(2):
        updates, after = jax.eval_shape(tx.update, gradients[0], state, params)
        assert after == state
        for name, p in params.items():
            assert updates[name].shape == p.shape
            assert updates[name].dtype == (p.dtype if row.keeps_dtype else jnp.float32)
        assert jax.eval_shape(optim.apply_updates, params, updates) == abstract(params)
        state = after


@pytest.mark.parametrize("row", ROWS)
def test_jit_scan_and_donation_agree(row):
    """Three donated calls of one compiled step equal a scan over three steps, and compile once."""
    tx = row()
    params, gradients = example("bfloat16")
    step, traces = make_step(tx), []

    def counted(*args):
        traces.append(1)
        return step(*args)

    compiled = jax.jit(counted, donate_argnums=(0, 1))
    donated = (jax.tree.map(jnp.copy, params), tx.init(params))
    for g in gradients:
        donated = compiled(*donated, g)
    assert len(traces) == 1

    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *gradients)
    scanned, _ = jax.jit(lambda p, s: jax.lax.scan(lambda c, g: (step(*c, g), None), (p, s), stacked))(
        params, tx.init(params)
    )
    for a, b in zip(jax.tree.leaves(donated), jax.tree.leaves(scanned), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=1e-6)
    assert abstract(donated) == abstract(scanned)


@pytest.mark.parametrize("row", ROWS)
def test_composes(row):
    """In chain, multi_transform, inject_hyperparams and MultiSteps: three steps, and the state keeps its types.

    The injected numbers are float32: by default they take the dtype of the parameters, and b2 = .999 is 1 in bfloat16.
    """
    # Optax's own states drift there, from bfloat16 to float32.
    params, gradients = example("float32" if row.keeps_dtype else "bfloat16", scalar=())
    parts = optax.multi_transform({"a": row(), "b": optax.set_to_zero()}, {"kernel": "a", "scalar": "b"})
    wrapped = {
        "chain, multi_transform": optax.chain(optax.clip_by_global_norm(1.0), parts),
        "inject": optax.inject_hyperparams(row.factory, hyperparam_dtype=jnp.float32)(**row.kwargs),
        "multi_steps": optax.MultiSteps(row(), 2).gradient_transformation(),
    }
    for name, tx in wrapped.items():
        state, current = tx.init(params), params
        step = jax.jit(make_step(tx))
        for i, g in enumerate(gradients):
            before = current
            current, after = step(current, state, g)
            assert abstract(after) == abstract(state), name
            assert abstract(current) == abstract(params), name
            state = after
            if name == "multi_steps" and i != 1:
                assert same_bits(current, before)
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(current)), name
        assert not same_bits(current["kernel"], params["kernel"]), name
        if "multi_transform" in name:
            assert same_bits(current["scalar"], params["scalar"])


@pytest.mark.parametrize("row", ROWS)
def test_empty_trees_empty_leaves_and_map_params(row):
    tx = row()
    state = tx.init({})
    updates, after = tx.update({}, state, {})
    assert updates == {}
    assert abstract(after) == abstract(state)

    nothing = {"x": jnp.zeros((0, 3))}
    updates, _ = tx.update(nothing, tx.init(nothing), nothing)
    assert updates["x"].shape == (0, 3)

    params, _ = example("float32")
    state = tx.init(params)
    assert same_bits(optax.tree.map_params(tx, lambda x: x, state), state)


@pytest.mark.parametrize("row", ROWS)
def test_vmap_over_an_ensemble(row):
    """Two models side by side step as each does alone."""
    tx = row()
    params, gradients = example("float32")
    pair = jax.tree.map(lambda a, b: jnp.stack([a, b]), params, gradients[0])
    slopes = jax.tree.map(lambda a, b: jnp.stack([a, b]), gradients[1], gradients[2])
    state = jax.jit(jax.vmap(tx.init))(pair)
    together, after = jax.jit(jax.vmap(make_step(tx)))(pair, state, slopes)
    step = jax.jit(make_step(tx))
    assert abstract(after) == abstract(state)
    for i in range(2):
        one, g = (jax.tree.map(lambda x, i=i: x[i], t) for t in (pair, slopes))
        alone, _ = step(one, tx.init(one), g)
        for name in params:
            # Noise may differ by row; a first step of Adam and the nearest rounding do not draw any that shows.
            tolerance = 0.3 if "stochastic" in row.name else 2e-6
            np.testing.assert_allclose(together[name][i], alone[name], rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("row", ROWS)
def test_zero_gradients_change_nothing(row):
    """Without weight decay, at the first step and after others, zero gradients from the start give zero updates."""
    kwargs = dict(row.kwargs)
    if "learning_rate" in kwargs and row.factory is not optax.sgd:
        kwargs["weight_decay"] = 0.0
    if "inner" in kwargs:
        kwargs["inner"] = optax.sgd(0.01)
    tx = row.factory(**kwargs)
    # Trap 50: eps is 0 in float16, so that Optax's Adam gives NaN there.
    params = {"x": jnp.asarray([1.0, -0.3, 0.0], "float32" if row.keeps_dtype else "float16")}
    state, zeros = tx.init(params), jax.tree.map(jnp.zeros_like, params)
    current, update = params, jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(zeros, state, current)
        assert not np.any(np.asarray(updates["x"], np.float32))
        current = optim.apply_updates(current, updates)
    assert same_bits(current, params)


@pytest.mark.parametrize("row", ROWS)
def test_descends(row):
    """The loss of a quadratic falls by a tenth or more in 20 steps."""
    tx = optax.chain(row(), optax.scale(-0.05)) if row.ascends else row()
    target = jnp.linspace(-0.1, 0.1, 12).reshape(3, 4)

    def loss(p):
        return jnp.sum((p["x"].astype(jnp.float32) - target) ** 2)

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return (optim.apply_updates(params, updates), state), None

    params = {"x": jnp.full((3, 4), 0.5, jnp.bfloat16)}
    (after, _), _ = jax.jit(lambda c: jax.lax.scan(body, c, length=20))((params, tx.init(params)))
    assert loss(after) < 0.9 * loss(params)


def test_integer_parameters_are_refused_by_name():
    params = {"codes": jnp.zeros(3, jnp.uint8)}
    for tx in (optim.cast_gradients(), optim.scale_by_low_precision_adam(), optim.master_weights(optax.sgd(0.1))):
        with pytest.raises(TypeError, match=r"parameter \['codes'\] has dtype uint8; .*multi_transform"):
            tx.init(params)


def test_is_quantized_marks_only_qtensors():
    assert is_quantized(optim.quantize_weights(jnp.ones((2, 2))))
    assert not is_quantized(jnp.ones(2))

"""Master weights and quantized weights: W = Q(master), bit for bit, after every step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4jax
from fp4jax import optim

WEIGHTS = {
    "bfloat16": lambda x: x.astype(jnp.bfloat16),
    "float16": lambda x: x.astype(jnp.float16),
    "e4m3": optim.quantize_weights,
    "e5m2 blocks": lambda x: optim.quantize_weights(
        x, fp4jax.QuantSpec(fp4jax.E5M2, fp4jax.PerBlock(2), fp4jax.PowerOfTwo("rceil"))
    ),
    "e2m1 mx": lambda x: optim.quantize_weights(
        x, fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(2), fp4jax.PowerOfTwo())
    ),
}
# Scales of these are no powers of two, so that only float32 masters go with them.
FLOAT32_ONLY = {
    "e4m3 absmax": lambda x: optim.quantize_weights(x, fp4jax.QuantSpec(fp4jax.E4M3, fp4jax.PerVector())),
    "nvfp4": lambda x: optim.quantize_weights(x, fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(2), fp4jax.TwoLevel())),
}
CASES = [(w, m) for w in WEIGHTS for m in ("float32", "float16")] + [(w, "float32") for w in FLOAT32_ONLY]


def bits(tree):
    return [(np.asarray(x).tobytes(), x.dtype) for x in jax.tree.leaves(tree)]


def master_value(state):
    """The float32 master, whose FP16 form is one of a single power-of-two scale."""
    if state.master_scale is None:
        return state.master["w"]
    exponent = jax.lax.bitcast_convert_type(state.master_scale["w"], jnp.uint8).astype(jnp.int32) - 127
    return jnp.ldexp(state.master["w"].astype(jnp.float32), exponent.reshape(()))


def quantized_master(params, state):
    """Q(master), by the rule of the stored weight: independent of how the optimizer got there."""
    w = params["w"]
    if isinstance(w, fp4jax.QTensor):
        return fp4jax.quantize(master_value(state), w.spec, axis=w.axis)
    return master_value(state).astype(w.dtype)


def given_updates():
    """A transformation whose update is the gradient, so that a test chooses where the master goes."""
    return optax.stateless(lambda updates, params: updates)


@pytest.mark.parametrize(("weight", "master"), CASES)
def test_stored_weights_are_the_quantized_master_after_each_step(weight, master):
    """Trap 59, over steps of all sizes: small, many times the weight, and such that weights vanish or cross zero."""
    rng = np.random.default_rng(0)
    make = (WEIGHTS | FLOAT32_ONLY)[weight]
    params = {"w": make(jnp.asarray(rng.normal(size=(6, 5)), jnp.float32))}
    tx = optim.master_weights(given_updates(), master)
    state = tx.init(params)

    @jax.jit
    def step(params, state, u):
        updates, state = tx.update({"w": u}, state, params)
        return optim.apply_updates(params, updates), state

    for i in range(16):
        current = np.asarray(master_value(state))
        size = 10.0 ** rng.integers(-6, 3, size=current.shape)
        u = rng.normal(size=current.shape) * size * np.abs(current)
        if i % 3 == 2:  # to a fraction down to 10⁻⁸ of itself, of either sign
            u = current * (
                -1 + rng.choice([-1, 1], size=current.shape) * 10.0 ** rng.uniform(-8, 0, size=current.shape)
            )
        params, state = step(params, state, jnp.asarray(u, jnp.float32))
        assert bits(params["w"]) == bits(quantized_master(params, state))
        # And the master is where the update led, to its own precision, or to float32's at the size of the old weight.
        wanted = current + np.float32(u)
        unit = 2.0**-10 if master == "float16" else 2.0**-23
        largest = np.abs(wanted).max()
        bound = unit * np.abs(wanted) + 2.0**-23 * np.abs(current) * 4 + largest * (2.0**-38 if unit > 1e-4 else 0)
        # The stored weight stands in for the master in u': half a step of E2M1 off, at most its block's largest.
        bound += 2.0**-23 * np.abs(current).max() * (not weight.startswith(("bf", "fl")))
        assert np.all(np.abs(np.asarray(master_value(state)) - wanted) <= bound)


floats = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(floats, floats), min_size=4, max_size=4), st.sampled_from(CASES))
def test_stored_weights_are_the_quantized_master_wherever_it_goes(pairs, case):
    weight, master = case
    start, target = (jnp.asarray(x, jnp.float32).reshape(2, 2) for x in zip(*pairs, strict=True))
    params = {"w": (WEIGHTS | FLOAT32_ONLY)[weight](start)}
    tx = optim.master_weights(given_updates(), master)
    state = tx.init(params)
    updates, state = tx.update({"w": target - master_value(state)}, state, params)
    params = optim.apply_updates(params, updates)
    assert bits(params["w"]) == bits(quantized_master(params, state))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("master", ["float32", "float16"])
def test_optax_applies_unquantized_weights_alike(dtype, master):
    params = {"w": jnp.linspace(-1, 1, 33).astype(dtype)}
    tx = optim.master_weights(optax.sgd(0.3), master)
    updates, _ = tx.update({"w": jnp.linspace(3, -2, 33)}, tx.init(params), params)
    assert bits(optim.apply_updates(params, updates)) == bits(optax.apply_updates(params, updates))


@pytest.mark.parametrize("weight", WEIGHTS)
def test_zero_updates_leave_every_code_alone(weight):
    """What a skipped step returns. Quantizing again would not do: a block whose top rounds down would change scale."""
    params = {"w": WEIGHTS[weight](jnp.linspace(-128.1, 128.1, 24).reshape(6, 4))}
    zeros = {"w": jnp.zeros((6, 4))}
    assert bits(optim.apply_updates(params, zeros)) == bits(params)


@pytest.mark.parametrize("weight", [*WEIGHTS, *FLOAT32_ONLY])
def test_a_step_that_moves_nothing_changes_nothing(weight):
    params = {"w": (WEIGHTS | FLOAT32_ONLY)[weight](jnp.linspace(-128.1, 128.1, 24).reshape(6, 4))}
    tx = optim.master_weights(optax.sgd(0.1))
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update({"w": jnp.ones((6, 4))}, state, params)
        params = optim.apply_updates(params, updates)
    before = master_value(state)
    updates, after = tx.update({"w": jnp.zeros((6, 4))}, state, params)
    assert bits(optim.apply_updates(params, updates)) == bits(params)
    np.testing.assert_array_equal(master_value(after), before)


@pytest.mark.parametrize("master", ["float32", "float16"])
def test_steps_too_small_for_the_weights_add_up_in_the_master(master):
    """1,000 steps of 10⁻⁵ from 1: BF16 alone would not move, nor would FP16 rounded to nearest (unit 2⁻¹⁰)."""
    params = {"w": jnp.ones(512, jnp.bfloat16)}
    tx = optim.master_weights(optax.sgd(1e-5), master)

    def body(carry, _):
        params, state = carry
        updates, state = tx.update({"w": jnp.ones(512)}, state, params)
        return (optim.apply_updates(params, updates), state), None

    (params, state), _ = jax.jit(lambda c: jax.lax.scan(body, c, length=1000))((params, tx.init(params)))
    master = np.asarray(master_value(state))
    # A stochastic step of 2⁻¹¹ with probability .02, 1,000 times over, in 512 weights.
    deviation = np.sqrt(1000 * 1e-5 * 2.0**-11 / 512)
    assert abs(master.mean() - 0.99) < 5 * deviation
    assert np.all(np.asarray(params["w"], np.float32) < 1)


def test_weight_decay_and_its_mask_see_the_masters_only():
    """Decay acts on kernels that are quantized, as arrays, and on no scale or norm."""
    params = optim.quantize_weights({"kernel": jnp.full((4, 4), 0.5), "norm": jnp.ones(4)})
    seen = []

    def mask(p):
        seen.append(jax.tree.map(lambda x: (x.shape, x.dtype.name), p))
        return jax.tree.map(lambda x: x.ndim > 1, p)

    tx = optim.adamw(0.1, weight_decay=0.5, mask=mask)
    state = tx.init(params)
    zeros = {"kernel": jnp.zeros((4, 4)), "norm": jnp.zeros(4)}
    updates, state = tx.update(zeros, state, params)
    params = optim.apply_updates(params, updates)
    np.testing.assert_allclose(state.inner_state.master["kernel"], 0.5 * (1 - 0.1 * 0.5), rtol=1e-6)
    np.testing.assert_array_equal(params["norm"], 1)
    assert all(s == {"kernel": ((4, 4), "float32"), "norm": ((4,), "float32")} for s in seen)
    assert seen


def test_gradients_of_quantized_weights_reach_the_master_in_float32():
    """Trap 60: 2e-4 is 0 in FP8; the master moves by it all the same."""
    params = optim.quantize_weights({"w": jnp.ones((2, 2))})
    slope = jax.grad(lambda p: 2e-4 * jnp.sum(p["w"]))(optim.dequantize_weights(params))
    assert slope["w"].dtype == jnp.float32
    tx = optim.master_weights(optax.sgd(1.0))
    _, state = tx.update(slope, tx.init(params), params)
    np.testing.assert_allclose(state.master["w"], 1 - 2e-4, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "master"), [("float32", "float16"), ("bfloat16", "float32")])
def test_flax_nnx_optimizer_with_a_decay_mask(dtype, master):
    """Trap 56: nnx.Optimizer applies with Optax; the state of its parameters is a tree like any other."""
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0), param_dtype=dtype)
    decayed = lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    tx = optim.adamw(0.1, weight_decay=0.1, mask=decayed, master_dtype=master)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = jnp.ones((5, 4), dtype)

    def loss(model):
        return jnp.mean((model(x).astype(jnp.float32) - 1.0) ** 2)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(loss)(model))

    before = loss(model)
    for _ in range(5):
        step(model, optimizer)
    assert loss(model) < 0.5 * before
    if dtype == "bfloat16":
        kernel = optimizer.opt_state.inner_state.master["kernel"][...]
        np.testing.assert_array_equal(kernel.astype(jnp.bfloat16), model.kernel[...])


def test_errors_say_what_would_work():
    params = optim.quantize_weights({"w": jnp.ones((2, 2))})
    tx = optim.master_weights(optax.sgd(0.1))
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"call update\(updates, state, params\)"):
        tx.update({"w": jnp.ones((2, 2))}, state)
    with pytest.raises(TypeError, match=r"gradient of \['w'\] is a QTensor, in float8_e4m3fn; .*dequantize_weights"):
        tx.update(params, state, params)
    with pytest.raises(ValueError, match="dtype='bfloat16' is not supported; use one of float32, float16"):
        optim.master_weights(optax.sgd(0.1), "bfloat16")
    absmax = optim.quantize_weights({"w": jnp.ones((2, 2))}, fp4jax.QuantSpec(fp4jax.E4M3, fp4jax.PerTensor()))
    with pytest.raises(ValueError, match=r"weight \['w'\] has scale=AbsMax\(\); FP16 masters need PowerOfTwo\(\)"):
        optim.master_weights(optax.sgd(0.1), "float16").init(absmax)
    noisy = fp4jax.QuantSpec(fp4jax.E4M3, rounding=fp4jax.STOCHASTIC)
    with pytest.raises(ValueError, match="equal masters must give equal weights; use NEAREST_EVEN"):
        optim.quantize_weights({"w": jnp.ones((2, 2))}, noisy)

"""Low-precision Adam: what it stores, what it costs, and that rounding does not bias it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp4jax
from fp4jax import optim
from fp4jax.optim.stochastic import HashedStochastic, Surviving, Vanishing, hashed_noise, leaf_words, step_words

DTYPES = [("float8_e4m3fn", "float16"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "float32")]


def run(tx, gradients, steps):
    """The last updates, the state after ``steps`` steps with the same gradients, and the largest |update| of each."""

    def body(state, _):
        updates, state = tx.update(gradients, state)
        return state, (updates, jax.tree.map(lambda u: jnp.max(jnp.abs(u)), updates))

    state, (updates, largest) = jax.jit(lambda s: jax.lax.scan(body, s, length=steps))(tx.init(gradients))
    return jax.tree.map(lambda u: u[-1], updates), state, jax.tree.map(lambda x: float(x.max()), largest)


def test_the_moments_stay_e4m3_and_fp16_for_1000_steps():
    """Traps 49, 52 and 53."""
    tx = optim.scale_by_low_precision_adam()
    gradients = {"w": jax.random.normal(jax.random.key(0), (8, 16)), "b": jnp.float32(0.3)}
    _, state, _ = run(tx, gradients, 1000)
    assert jax.eval_shape(lambda: state) == jax.eval_shape(tx.init, gradients)
    for leaf in gradients:
        assert state.mu[leaf].dtype == jnp.float8_e4m3fn
        assert state.nu[leaf].dtype == jnp.float16
        assert state.mu_scale[leaf].dtype == state.nu_scale[leaf].dtype == jnp.float32
    assert state.count == 1000


def nbytes(tree):
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("granularity", [fp4jax.PerTensor(), fp4jax.PerBlock(128)])
def test_bytes_a_parameter(granularity):
    """Counted from the state: at most 3.1 for m and v, and 7.1 with FP16 masters and BF16 weights."""
    shapes = {"embedding": (4096, 512), "mlp": (4, 512, 1376), "norm": (4, 512)}
    params = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16) for name, s in shapes.items()}
    count = sum(math.prod(s) for s in shapes.values())

    moments = jax.eval_shape(optim.scale_by_low_precision_adam(granularity=granularity).init, params)
    assert nbytes(moments[1:]) <= 3.1 * count
    whole = jax.eval_shape(optim.adamw(1e-3, master_dtype="float16", granularity=granularity).init, params)
    assert nbytes((whole, params)) <= 7.1 * count

    # The paper's 6 bytes: FP8 weights, FP16 masters.
    quantized = jax.eval_shape(lambda: optim.quantize_weights(jax.tree.map(lambda p: jnp.zeros(p.shape), params)))
    whole = jax.eval_shape(optim.adamw(1e-3, master_dtype="float16", granularity=granularity).init, quantized)
    assert nbytes((whole, quantized)) <= 6.1 * count


def test_float32_moments_are_optax():
    tx = optim.scale_by_low_precision_adam(0.8, 0.95, 1e-6, 1e-7, "float32", "float32", nesterov=True)
    reference = optax.scale_by_adam(0.8, 0.95, 1e-6, 1e-7, nesterov=True)
    gradients = {"w": jnp.linspace(-1, 1, 12).reshape(3, 4)}
    ours, theirs = tx.init(gradients), reference.init(gradients)
    for _ in range(3):
        u, ours = tx.update(gradients, ours)
        v, theirs = reference.update(gradients, theirs)
        np.testing.assert_array_equal(u["w"], v["w"])
    np.testing.assert_array_equal(ours.nu["w"], theirs.nu["w"])


@pytest.mark.parametrize(("mu_dtype", "nu_dtype"), DTYPES)
def test_constant_gradients_of_any_size_give_updates_of_one(mu_dtype, nu_dtype):
    """1e-7, 1e-4 and 1e4 in one tree: |update| is at most 1.1, and no less than .9 (eps takes 9 % of 1e-7)."""
    gradients = {str(g): jnp.full((3, 5), g, jnp.float32) for g in (1e-7, 1e-4, 1.0, 1e4)}
    tx = optim.scale_by_low_precision_adam(mu_dtype=mu_dtype, nu_dtype=nu_dtype)
    updates, _, largest = run(tx, gradients, 300)
    # bfloat16 v, which has no scale, still rounds by 2⁻⁸ a step: a random walk of a few per cent.
    bound = 1.1 if nu_dtype != "bfloat16" else 1.2
    for g in gradients:
        assert largest[g] <= bound
        assert np.all(np.asarray(updates[g]) >= 0.9 * float(g) / (float(g) + 1e-8))


@pytest.mark.parametrize("granularity", [fp4jax.PerTensor(), fp4jax.PerBlock(32)])
def test_unequal_constant_gradients_are_unbiased(granularity):
    """Over eight decades in one leaf: the mean update is 1 where m has full precision, and none is above 2."""
    rng = np.random.default_rng(0)
    g = jnp.asarray(np.float32(10.0 ** rng.uniform(-6, 2, 4096)))
    updates, state, largest = run(optim.scale_by_low_precision_adam(eps=0.0, granularity=granularity), g, 200)
    assert largest <= 2.0
    full = np.asarray(g) > 1e-2  # m / amax(m) above 2⁻¹⁴, the normal range of E4M3
    assert abs(float(np.mean(np.asarray(updates)[full])) - 1) < 3e-3
    assert float(np.max(np.asarray(updates)[full])) < 1.25
    scale = granularity.expand(state.nu_scale, g.shape, (-1,))
    v = np.asarray(state.nu.astype(jnp.float32) * scale) / np.asarray(g) ** 2 / (1 - 0.999**200)
    assert abs(v[full].mean() - 1) < 1e-3


def test_nearest_rounding_would_stall():
    """The fault that stochastic rounding is there for: an average that rounds to nearest stops short of its input."""
    spec = fp4jax.QuantSpec(optim.storage.FP16, fp4jax.PerTensor())
    v = jnp.array([1.0, 0.5])  # the 1 holds the scale still, as any large neighbor does
    for _ in range(300):
        v = fp4jax.quantize(0.999 * v + 0.001 * jnp.array([1.0, 0.6]), spec, axis=-1).dequantize()
    assert v[1] == 0.5  # .0001 a step is less than half a unit in the last place


def test_a_spike_does_not_blow_up_its_neighbors():
    """v of the small gradients underflows FP16 after a spike of 1e9; rounded to 0 it would give updates of 1/eps."""
    quiet = jnp.full(64, 1e-2).at[0].set(1.0)
    tx = optim.scale_by_low_precision_adam()
    update = jax.jit(tx.update)
    state = tx.init(quiet)
    for step in range(60):
        updates, state = update(quiet.at[0].set(1e9) if step == 5 else quiet, state)
        assert np.abs(np.asarray(updates[1:])).max() < 1.2
    assert np.all(np.asarray(state.nu) > 0)


def test_noise_is_uniform_and_differs_by_step_leaf_and_seed():
    words = step_words(0, jnp.int32(1))
    noise = np.asarray(hashed_noise(words, (64, 1024))) / 2**24
    assert abs(noise.mean() - 0.5) < 4 / math.sqrt(12 * noise.size)
    counts = np.histogram(noise, 64, (0, 1))[0]
    assert np.sum((counts - 1024) ** 2 / 1024) < 63 + 5 * math.sqrt(2 * 63)  # chi-squared
    for axis in range(2):
        a, b = np.moveaxis(noise, axis, 0)[:-1].ravel() - 0.5, np.moveaxis(noise, axis, 0)[1:].ravel() - 0.5
        assert abs(np.mean(a * b) * 12) < 5 / math.sqrt(a.size)
    path = (jax.tree_util.DictKey("w"),)
    others = [
        step_words(0, jnp.int32(2)),
        step_words(1, jnp.int32(1)),
        step_words(jax.random.key(7), jnp.int32(1)),
        leaf_words(words, path),
        leaf_words(words, path, "mu"),
    ]
    for other in others:
        b = np.asarray(hashed_noise(other, (64, 1024))) / 2**24
        assert abs(np.mean((noise - 0.5) * (b - 0.5)) * 12) < 5 / math.sqrt(noise.size)


@pytest.mark.parametrize("rounding", [HashedStochastic(), Vanishing(), Surviving()])
def test_stochastic_rounding_is_unbiased_on_two_neighbors(rounding):
    u = jnp.full(2**16, 3.3)
    landed = np.asarray(rounding(u, fp4jax.E2M1, step_words(3, jnp.int32(0))))
    assert set(landed.tolist()) == {3.0, 4.0}
    assert abs(landed.mean() - 3.3) < 5 * math.sqrt(0.3 * 0.7 / landed.size)
    if rounding != Surviving():  # a second moment has no sign
        np.testing.assert_array_equal(rounding(-u, fp4jax.E2M1, step_words(3, jnp.int32(0))), -landed)


def test_below_the_smallest_value_m_vanishes_and_v_survives():
    words, u = step_words(0, jnp.int32(0)), jnp.array([0.0, 1e-9, 0.2, 0.24999])
    np.testing.assert_array_equal(Vanishing()(u, fp4jax.E2M1, words), [0, 0, 0, 0])
    assert np.all(np.asarray(Surviving()(u, fp4jax.E2M1, words)) == [0, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("granularity", [fp4jax.PerTensor(), fp4jax.PerBlock(8)])
def test_the_mesh_does_not_change_a_bit(granularity):
    """On eight devices, parameters split over two axes, the state is that of one device."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    params = {"w": jnp.linspace(-1, 1, 128).reshape(8, 16), "b": jnp.linspace(0, 1, 16)}
    gradients = jax.tree.map(lambda p: jax.random.normal(jax.random.key(0), p.shape) * p, params)
    tx = optim.scale_by_low_precision_adam(granularity=granularity)

    def two_steps(gradients):
        state, updates = jax.lax.scan(lambda s, _: tx.update(gradients, s)[::-1], tx.init(gradients), length=2)
        return jax.tree.map(lambda u: u[-1], updates), state

    expected = jax.jit(two_steps)(gradients)
    sharded = {
        "w": jax.device_put(gradients["w"], NamedSharding(mesh, P("fsdp", "tensor"))),
        "b": jax.device_put(gradients["b"], NamedSharding(mesh, P("fsdp"))),
    }
    with jax.set_mesh(mesh):
        updates, state = jax.jit(two_steps)(sharded)
    assert updates["w"].sharding.spec == P("fsdp", "tensor")
    assert state.mu["w"].sharding.spec == P("fsdp", "tensor")
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves((updates, state)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_x64_changes_no_dtype():
    """Trap 54."""
    with jax.enable_x64(True):
        params = {"w": jnp.ones((2, 3), jnp.float32)}
        tx = optim.adamw(0.1, clip_norm=1.0, loss_scale=8.0)
        state = jax.eval_shape(tx.init, params)
        updates, after = jax.eval_shape(tx.update, params, state, params)
        assert updates["w"].dtype == jnp.float32
        assert after == state
        assert not any(x.dtype in (jnp.float64, jnp.int64) for x in jax.tree.leaves(after))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"nu_dtype": "float8_e4m3fn"},
            r"nu_dtype='float8_e4m3fn' is not supported; use one of float16, bfloat16, float32",
        ),
        ({"mu_dtype": "int8"}, r"mu_dtype='int8' is not supported; use one of float8_e4m3fn, float8_e5m2, float16, bf"),
        ({"mu_dtype": fp4jax.E2M1}, r"mu_dtype=E2M1 is not supported"),
    ],
)
def test_unsupported_dtypes_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        optim.scale_by_low_precision_adam(**kwargs)


@pytest.mark.parametrize("spelled", ["float8_e4m3fn", jnp.float8_e4m3fn, jnp.dtype("float8_e4m3fn"), fp4jax.E4M3])
def test_a_dtype_may_be_spelled_in_four_ways(spelled):
    state = optim.scale_by_low_precision_adam(mu_dtype=spelled).init(jnp.ones(3))
    assert state.mu.dtype == jnp.float8_e4m3fn

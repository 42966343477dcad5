"""The FP8 mean over eight devices: against float64, and what the compiled program puts on the wire."""

import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp4jax
from fp4jax import optim
from fp4jax.parallel import fp8_mean, fp8_mean_scatter, gather_shards, local_shards, reduce

DEVICES = 8
FORMATS = {fp4jax.E4M3: ml_dtypes.float8_e4m3fn, fp4jax.E5M2: ml_dtypes.float8_e5m2}


def mesh_of(*shape):
    return jax.make_mesh(shape, ("data", "tensor")[: len(shape)])


def on_devices(function, trees, check_vma=True, mesh=None, axes="data", out_specs=None):
    """Runs ``function`` in a shard_map on leaves [devices, …], of which each device gets its own; jitted."""
    mesh = mesh or mesh_of(DEVICES)
    spec = P(axes)
    put = jax.device_put(trees, NamedSharding(mesh, spec))

    def local(tree):
        return function(jax.tree.map(lambda x: x[0], tree))

    run = jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=P() if out_specs is None else out_specs, check_vma=check_vma
    )
    return jax.jit(run), put


def mean_of(trees, **kwargs):
    run, put = on_devices(lambda tree: fp8_mean(tree, "data", **kwargs), trees)
    return jax.tree.map(np.asarray, run(put))


def gradients(seed=0, dtype=np.float32):
    """Leaves of sizes that eight does not divide, some smaller than eight, of very different magnitudes."""
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (7, 13), "tiny": (3,), "scalar": (), "even": (16, 4), "empty": (0, 2)}
    scales = {"kernel": 1e-7, "tiny": 1e4, "scalar": 1.0, "even": 1e-3, "empty": 1.0}
    return {n: (rng.normal(size=(DEVICES, *s)) * scales[n]).astype(dtype) for n, s in shapes.items()}


def oracle(x, format):
    """NumPy's own two roundings, each under amax / M: [devices, …] to the mean, in float64 but for the roundings."""
    narrow = FORMATS[format]

    def round_to_grid(x, amax):
        u = x.astype(np.float32) * (np.float32(format.max) / amax)
        return u.astype(narrow).astype(np.float64) / format.max * float(amax)

    amax = np.abs(x).max().astype(np.float32)
    mean = round_to_grid(x, amax).mean(axis=0)
    return round_to_grid(mean, np.abs(mean).max().astype(np.float32))


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_equals_the_oracle(format):
    """Up to float32 rounding of the sum, and a step of the grid where that crosses a boundary (in 1 % at most)."""
    trees = gradients()
    result = mean_of(trees, format=format)
    for name, x in trees.items():
        if x.size == 0:
            assert result[name].shape == (0, 2)
            continue
        expected = oracle(x, format)
        close = np.isclose(result[name], expected, rtol=1e-6, atol=0)
        assert np.mean(close) >= 0.99
        step = 2.0**-format.mantissa_bits
        np.testing.assert_allclose(result[name], expected, rtol=step, atol=np.abs(expected).max() * 1e-6)


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_error_is_that_of_two_fp8_roundings(format):
    """Half a step of each summand, averaged, and of the mean; plus the smallest value of each grid."""
    trees = gradients(1)
    result = mean_of(trees, format=format)
    half = 2.0 ** -(format.mantissa_bits + 1)
    smallest = float(format.grid[format.grid > 0][0]) / format.max
    for name in ("kernel", "even", "tiny", "scalar"):
        x = trees[name].astype(np.float64)
        bound = half * np.abs(x).mean(axis=0) * (1 + half) + half * np.abs(x.mean(axis=0)) + smallest * np.abs(x).max()
        assert np.all(np.abs(result[name] - x.mean(axis=0)) <= bound * (1 + 1e-6))


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_eight_hundreds_average_to_one_hundred(format):
    """Trap 61: summed in FP8, E4M3 gives NaN and E5M2 768."""
    result = mean_of(np.full((DEVICES, 3), 100.0, np.float32), format=format)
    np.testing.assert_array_max_ulp(result, np.full(3, 100.0, np.float32), maxulp=1)


def test_equal_gradients_pass_to_one_unit_in_the_last_place():
    values = [100.0, 1e-30, 3.3e38, 1.0, 0.1, 448.0, -7.7]
    for value, mean in zip(values, mean_of([np.full((DEVICES, 5), v, np.float32) for v in values]), strict=True):
        np.testing.assert_array_max_ulp(mean, np.full(5, value, np.float32), maxulp=1)


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_one_large_and_seven_small_summands(format):
    """Trap 61, [1, 2⁻⁶ × 7]: the sum is 1.109375, of which FP8 accumulation would lose the small ones."""
    x = np.full((DEVICES, 1), 2.0**-6, np.float32)
    x[0] = 1.0
    np.testing.assert_allclose(mean_of(x, format=format) * DEVICES, 1.109375, rtol=1e-6)
    beside = np.concatenate([x, np.ones_like(x)], axis=1)  # now the mean shares its scale with a 1
    np.testing.assert_allclose(
        mean_of(beside, format=format)[0] * DEVICES, 1.109375, rtol=2.0 ** -(format.mantissa_bits + 1)
    )


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_what_fp8_holds_exactly_passes_unchanged(format):
    """Every value of the format within its normal range times a power of two, equal on all devices."""
    grid = format.grid[np.abs(format.grid) >= 2.0**format.min_exponent] * np.float32(2.0**-20)
    np.testing.assert_array_equal(mean_of(np.tile(grid, (DEVICES, 1)), format=format), grid)


def test_a_leaf_that_is_not_finite_on_one_device_is_nan_on_all():
    x = {"a": np.ones((DEVICES, 9), np.float32), "b": np.ones((DEVICES, 4), np.float32)}

    def each(tree):  # every device returns what it got, so that none is taken for another
        return jax.tree.map(lambda y: y[None], fp8_mean(tree, "data"))

    run, put = on_devices(each, x, check_vma=False, out_specs=P("data"))
    for bad, device in itertools.product((np.nan, np.inf, -np.inf), (0, 5)):
        spoiled = x["a"].copy()
        spoiled[device, 7] = bad
        result = run({"a": jax.device_put(spoiled, put["a"].sharding), "b": put["b"]})
        assert np.isnan(np.asarray(result["a"])).all()
        np.testing.assert_array_equal(result["b"], 1)


def test_zeros_subnormals_and_half_precision():
    np.testing.assert_array_equal(mean_of(np.zeros((DEVICES, 3), np.float32)), 0)
    tiny = mean_of(np.full((DEVICES, 2), 1e-40, np.float32))
    assert np.all(np.isfinite(tiny))
    for dtype in (jnp.bfloat16, np.float16):
        result = mean_of(np.full((DEVICES, 2), 1.5, dtype))
        assert result.dtype == np.float32
        np.testing.assert_array_equal(result, 1.5)


def test_stochastic_rounding_is_unbiased_and_differs_by_device():
    x = np.full((DEVICES, 4096), 1.05, np.float32)
    x[:, 0] = 448

    def scattered(seed):
        draw = {"rounding": fp4jax.STOCHASTIC, "key": jax.random.key(seed)}
        run, put = on_devices(lambda g: fp8_mean_scatter(g, "data", **draw), x, out_specs=P("data"))
        return np.asarray(run(put))

    result = scattered(0)
    # 1 or 1.125 on each device: were devices to draw alike, the mean would be one of the two.
    assert set(result[1:].tolist()) > {1.015625, 1.03125, 1.046875, 1.0625}
    deviation = 0.125 * np.sqrt(0.4 * 0.6 / (4095 * DEVICES))
    assert abs(result[1:].mean() - 1.05) < 5 * deviation
    assert not np.array_equal(result, scattered(1))
    both = mean_of(x, rounding=fp4jax.STOCHASTIC, key=jax.random.key(0))
    assert abs(both[1:].mean() - 1.05) < 5 * 0.0625 / np.sqrt(4095)


def collectives(run, put):
    """(operation, dtype, elements) of each collective of the compiled program."""
    found = []
    for line in run.lower(put).compile().as_text().splitlines():
        match = re.search(
            r"= (.*?) (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(-start)?\(", line
        )
        if match:
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
                found.append((match[2], dtype, int(np.prod([int(n) for n in shape.split(",") if n] or [1]))))
    return found


def test_the_wire_carries_one_byte_an_element():
    """One all-to-all and one all-gather of uint8 for all leaves together; beyond that, only a scale a leaf."""
    trees = gradients()
    run, put = on_devices(lambda tree: fp8_mean(tree, "data"), trees)
    found = collectives(run, put)
    padded = sum(-(-x[0].size // DEVICES) * DEVICES for x in trees.values())
    by_kind = {}
    for kind, dtype, elements in found:
        by_kind.setdefault(kind, []).append((dtype, elements))
    assert {d for d, _ in by_kind["all-to-all"]} == {"u8"}
    assert sum(n for _, n in by_kind["all-to-all"]) == padded
    assert by_kind["all-gather"] == [("u8", padded)]
    assert by_kind["all-reduce"] == [("f32", len(trees))] * 2
    assert set(by_kind) == {"all-to-all", "all-gather", "all-reduce"}


def test_full_buckets_travel_apart_and_change_no_number(monkeypatch):
    trees = gradients()
    together = mean_of(trees)
    monkeypatch.setattr(reduce, "_BUCKET", 64)
    run, put = on_devices(lambda tree: fp8_mean(tree, "data"), trees)
    # In order: empty and even (64), kernel (91, padded to 96), scalar and tiny.
    assert sorted(n for kind, _, n in collectives(run, put) if kind == "all-gather") == [16, 64, 96]
    apart = run(put)
    for name in trees:
        np.testing.assert_array_equal(apart[name], together[name])


def test_reduce_scatter_and_gather_give_the_parts_of_the_mean():
    trees = gradients()

    def parts(tree):
        scattered = fp8_mean_scatter(tree, "data")
        whole = gather_shards(scattered, "data", like=tree)
        mine = local_shards(whole, "data")
        equal = [jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(scattered), jax.tree.leaves(mine), strict=True)]
        return whole, jnp.stack(equal)[None]

    run, put = on_devices(parts, trees, out_specs=(P(), P("data")))
    whole, equal = run(put)
    assert np.all(equal)
    for name in ("kernel", "tiny", "scalar", "even"):
        x = trees[name].astype(np.float64)
        # One rounding: half a step of each summand.
        bound = 2.0**-4 * np.abs(x).mean(axis=0) + np.abs(x).max() * 2.0**-9 / 448
        assert np.all(np.abs(np.asarray(whole[name]) - x.mean(axis=0)) <= bound)


@pytest.mark.parametrize("dimension", [0, 1, -1])
def test_scatter_along_a_dimension(dimension):
    x = np.random.default_rng(0).normal(size=(DEVICES, 8, 16)).astype(np.float32)
    spec = [None, None]
    spec[dimension] = "data"
    run, put = on_devices(lambda g: fp8_mean_scatter(g, "data", dimension=dimension), x, out_specs=P(*spec))
    flat, _ = on_devices(lambda g: gather_shards(fp8_mean_scatter(g, "data"), "data", like=g), x)
    np.testing.assert_array_equal(run(put), flat(put))


def test_over_two_mesh_axes():
    x = np.random.default_rng(0).normal(size=(DEVICES, 33)).astype(np.float32)
    axes = ("data", "tensor")
    run, put = on_devices(lambda g: fp8_mean(g, axes), x, mesh=mesh_of(4, 2), axes=axes)
    np.testing.assert_array_equal(run(put), mean_of(x))
    one, put = on_devices(lambda g: fp8_mean(g, "data"), x[:1], mesh=mesh_of(1))
    np.testing.assert_allclose(one(put), x[0], rtol=2.0**-3)


def test_an_empty_tree():
    run, put = on_devices(lambda g: (fp8_mean({}, "data"), gather_shards({}, "data", like={})), np.ones((DEVICES, 1)))
    assert run(put) == ({}, {})


def test_sharded_optimizer_state_trains_as_replicated_state_does():
    """ZeRO: gradients reduce-scattered in FP8, moments and update on parts, weights gathered, two steps."""
    mesh = mesh_of(DEVICES)
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(5, 7)), jnp.float32), "b": jnp.zeros(7)}
    x = jax.device_put(jnp.asarray(rng.normal(size=(32, 5)), jnp.float32), NamedSharding(mesh, P("data")))
    tx = optim.adamw(0.1, grad_dtype=None)

    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) - 0.5) ** 2)

    def local_gradients(params, x):
        return jax.grad(loss)(jax.lax.pcast(params, "data", to="varying"), x)

    def replicated(params, x):
        state = tx.init(params)
        for _ in range(2):
            grads = fp8_mean(local_gradients(params, x), "data")
            updates, state = tx.update(grads, state, params)
            params = optim.apply_updates(params, updates)
        return params

    def sharded(params, x):
        mine = local_shards(params, "data")
        state = tx.init(mine)
        for _ in range(2):
            parts = fp8_mean_scatter(local_gradients(params, x), "data")
            updates, state = tx.update(parts, state, mine)
            mine = optim.apply_updates(mine, updates)
            params = gather_shards(mine, "data", like=params)
        return params

    start = loss(params, x)
    results = []
    for train in (replicated, sharded):
        run = jax.jit(jax.shard_map(train, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
        results.append(run(jax.device_put(params, NamedSharding(mesh, P())), x))
        assert loss(results[-1], x) < 0.8 * start
    # The second rounding of fp8_mean and the noise of the moments set them apart, by less than a step of .1.
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, atol=0.05)


def test_nan_on_one_device_skips_the_step_on_all():
    mesh = mesh_of(DEVICES)
    tx = optim.adamw(0.1)
    params = {"w": jnp.ones(12)}
    state = tx.init(params)

    def step(params, state, g):
        updates, state = tx.update(fp8_mean({"w": g[0]}, "data"), state, params)
        return optim.apply_updates(params, updates), state

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P()))
    g = np.ones((DEVICES, 12), np.float32)
    g[6, 3] = np.nan
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    after, skipped = run(put(params, P()), put(state, P()), put(g, P("data")))
    np.testing.assert_array_equal(after["w"], 1)
    assert skipped.skipped == 1


def test_errors_say_what_would_work():
    x = np.ones((DEVICES, 6), np.float32)
    cases = [
        (lambda g: fp8_mean(g, "data", format=fp4jax.E2M1), "format=E2M1 is not an 8-bit .*use E4M3 or E5M2"),
        (lambda g: fp8_mean(g, "data", rounding=fp4jax.STOCHASTIC), "key=None; pass key="),
        (
            lambda g: fp8_mean({"w": jnp.ones(3)}, "data"),
            r"leaf \['w'\] is the same on all devices of \['data'\].*pcast",
        ),
        (
            lambda g: fp8_mean_scatter({"w": g}, "data", dimension=0),
            r"dimension=0 of leaf \['w'\] of shape \(6,\) cannot",
        ),
    ]
    for function, message in cases:
        run, put = on_devices(function, x)
        with pytest.raises(ValueError, match=message):
            run(put)
    run, put = on_devices(lambda g: fp8_mean(g, "data"), x.astype(np.int32))
    with pytest.raises(TypeError, match="dtype int32"):
        run(put)

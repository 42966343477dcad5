"""Taps on single products: what comes out as the gradient of a probe, and what does not change."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from reference import QUICK, assert_statistics, statistics

import fp4jax
from fp4jax import E2M1, E5M2, REUSE, Gemm, PerBlock, PerTensor, PowerOfTwo, QuantSpec, Recipe, TwoLevel
from fp4jax.telemetry import collect
from fp4jax.telemetry.probe import SHAPE, observe

NUMBERS = (((1,), (0,)), ((), ()))
jitted = functools.partial(jax.jit, compiler_options=QUICK)


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def operands(m=24, k=40, n=16, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (m, k)) * jnp.exp2(jnp.arange(k, dtype=jnp.float32) % 5 - 2)
    return x.astype(dtype), jax.random.normal(keys[1], (k, n)), jax.random.normal(keys[2], (m, n)).astype(dtype)


def observed(x, w, dy, recipe, key=None, numbers=NUMBERS):
    """(gradients of x and w, snapshot) of Σ Y · dY."""

    def loss(x, w, probe):
        y = fp4jax.dot_general(x, w, numbers, recipe=recipe, key=key)
        return jnp.sum(observe(y, probe, x, w, numbers, recipe, key) * dy)

    dx, dw, sums = jitted(jax.grad(loss, (0, 1, 2)))(x, w, jnp.zeros(SHAPE))
    return (dx, dw), collect({"layer": {"probe": sums}})


def plain_gradients(x, w, dy, recipe, key=None):
    loss = lambda x, w: jnp.sum(fp4jax.dot_general(x, w, NUMBERS, recipe=recipe, key=key) * dy)
    return jitted(jax.grad(loss, (0, 1)))(x, w)


NVFP4 = QuantSpec(E2M1, PerBlock(16), TwoLevel())
RECIPES = {
    "fp4": fp4jax.recipes.fp4(),
    "fp4 sparse": fp4jax.recipes.fp4(compensation="sparse"),
    "fp8": fp4jax.recipes.fp8(),
    "blocks": Recipe("blocks", Gemm(NVFP4, NVFP4), Gemm(NVFP4, NVFP4), Gemm(NVFP4, NVFP4)),
    "weights only": Recipe("weights", fprop=Gemm(None, QuantSpec(E2M1)), dgrad=Gemm(None, REUSE)),
}


# One operand forward and one backward: enough where the transformation around the product is in question.
SMALL = Recipe("small", Gemm(QuantSpec(E2M1), None), Gemm(QuantSpec(E5M2, PerTensor()), None))


@pytest.mark.parametrize("name", RECIPES)
def test_a_probe_holds_what_numpy_finds_for_every_operand(name):
    recipe = RECIPES[name]
    dtype = jnp.bfloat16 if name == "fp4 sparse" else jnp.float32  # in which ΔX is added
    x, w, dy = operands(dtype=dtype)
    gradients, snapshot = observed(x, w, dy, recipe)
    for got, plain in zip(gradients, plain_gradients(x, w, dy, recipe), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(plain).tobytes()  # the tap changes nothing

    xs, ws, g = np.asarray(x), np.asarray(w), np.asarray(dy).astype(np.float32)
    specs, occ = recipe.specs, recipe.outliers
    expected = {}
    if specs["fprop.lhs"] is not None:
        expected["fprop.lhs"] = statistics(xs, specs["fprop.lhs"], 1, occ, dtype=xs.dtype)
        sx = oracle.quantize_activation(xs, specs["fprop.lhs"], occ, 1).block_scale.reshape(-1, 1)
    if specs["fprop.rhs"] is not None:
        expected["fprop.rhs"] = statistics(ws, specs["fprop.rhs"], 0)
        sw = oracle.quantize(ws, specs["fprop.rhs"], 0).block_scale.reshape(1, -1)
    if isinstance(specs["dgrad.lhs"], QuantSpec):
        folded = (g * sw).astype(np.float32) if specs["dgrad.rhs"] is REUSE or name == "fp8" else g
        expected["dgrad.lhs"] = statistics(folded, specs["dgrad.lhs"], 1)
    if isinstance(specs["wgrad.rhs"], QuantSpec):
        folded = (g * sx).astype(np.float32) if specs["wgrad.lhs"] is REUSE or name == "fp8" else g
        expected["wgrad.rhs"] = statistics(folded, specs["wgrad.rhs"], 0)
    if name == "blocks":
        expected["dgrad.rhs"] = statistics(ws, specs["dgrad.rhs"], 1)
        expected["wgrad.lhs"] = statistics(xs, specs["wgrad.lhs"], 0)
    assert set(snapshot.places) == set(expected)
    for record in snapshot.records:
        assert record.calls == 1
        assert_statistics(record.values, expected[record.place])
    if name == "fp4":
        (weight,) = snapshot.of(place="fprop.rhs")
        assert sum(weight.factors) == pytest.approx(1, abs=1e-6)


def test_the_activation_of_wgrad_is_clamped_as_in_fprop():
    spec = QuantSpec(E2M1, PerBlock(8), PowerOfTwo("rceil"))
    occ = fp4jax.OCC(0.95, scope="vector")
    recipe = Recipe("again", Gemm(spec, None), Gemm(None, None), Gemm(spec, QuantSpec(E5M2, PerTensor())), outliers=occ)
    x, w, dy = operands()
    _, snapshot = observed(x, w, dy, recipe)
    (record,) = snapshot.of(place="wgrad.lhs")
    assert_statistics(record.values, statistics(np.asarray(x), spec, 0, occ, clamp_axis=1))


def test_noise_is_measured_as_the_product_draws_it():
    # Through an identity whose values and scales are exact, dX is the quantized gradient itself.
    spec = QuantSpec(E2M1, PerTensor(), rounding=fp4jax.STOCHASTIC)
    recipe = Recipe("noisy", Gemm(None, QuantSpec(E2M1, scale=PowerOfTwo("rceil"))), Gemm(spec, REUSE))
    x, _, dy = operands(k=16)
    (dx, _), snapshot = observed(x, jnp.eye(16), dy, recipe, key=jax.random.key(5))
    exact, drawn = np.asarray(dy, np.float64), np.asarray(dx, np.float64)
    expected = 10 * np.log10(np.sum(exact**2) / np.sum((exact - drawn) ** 2))
    (record,) = snapshot.of(place="dgrad.lhs")
    assert record.snr_db == pytest.approx(expected, abs=1e-4)
    assert record.snr_db < 17  # to nearest it would be 19


def test_batch_axes_and_several_contracted_ones():
    recipe, numbers = fp4jax.recipes.fp4_vector(), (((2, 3), (1, 0)), ((0,), (3,)))
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (2, 5, 4, 6)), jax.random.normal(keys[1], (6, 4, 7, 2))
    dy = jax.random.normal(keys[2], (2, 5, 7))
    _, snapshot = observed(x, w, dy, recipe, numbers=numbers)
    by_place = {record.place: record.values for record in snapshot.records}
    assert_statistics(by_place["fprop.lhs"], statistics(np.asarray(x), QuantSpec(E2M1), (2, 3)))
    assert_statistics(by_place["fprop.rhs"], statistics(np.asarray(w), QuantSpec(E2M1), (1, 0)))
    sw = oracle.quantize(np.asarray(w), QuantSpec(E2M1), (0, 1)).block_scale  # [1, 1, 7, 2]
    folded = np.asarray(dy) * sw[0, 0].T[:, None, :]
    assert_statistics(by_place["dgrad.lhs"], statistics(folded.astype(np.float32), QuantSpec(E5M2, PerTensor()), 2))


def test_empty_operands_and_zeros():
    for m in (0, 3):
        gradients, snapshot = observed(
            jnp.zeros((m, 8)), jnp.zeros((8, 4)), jnp.zeros((m, 4)), fp4jax.recipes.fp4_vector()
        )
        assert all(np.all(np.asarray(g) == 0) for g in gradients)
        assert [record.snr_db for record in snapshot.records] == [np.inf] * 4


def test_a_nan_is_seen_where_it_is():
    x, w, dy = operands()
    _, snapshot = observed(x, w, dy.at[2, 3].set(jnp.nan), fp4jax.recipes.fp4_vector())
    finite = {record.place: bool(np.isfinite(record.snr_db)) for record in snapshot.records}
    assert finite == {"fprop.lhs": True, "fprop.rhs": True, "dgrad.lhs": False, "wgrad.rhs": False}
    assert snapshot.of(place="dgrad.lhs")[0].values["nonfinite"] == pytest.approx(1 / dy.size)


def test_a_product_that_runs_again_is_averaged():
    x, w, dy = operands()
    recipe = SMALL

    def loss(probe, scale):
        y = observe(
            fp4jax.dot_general(x * scale, w, NUMBERS, recipe=recipe), probe, x * scale, w, NUMBERS, recipe, None
        )
        return jnp.sum(y * dy)

    both = jitted(jax.grad(lambda probe: loss(probe, jnp.float32(1)) + loss(probe, jnp.float32(8))))(jnp.zeros(SHAPE))
    (record,) = collect({"layer": {"probe": both}}).of(place="fprop.lhs")
    one = statistics(np.asarray(x), QuantSpec(E2M1), 1, recipe.outliers)
    assert record.calls == 2
    assert_statistics(
        record.values, one | {n: 4.5 * one[n] for n in ("amax", "scale_min", "scale_max")} | {"mse": 32.5 * one["mse"]}
    )


def test_a_call_that_lost_nothing_adds_no_noise():
    """Its SNR is infinite; that of both calls is that of the other and 3 dB."""
    x, w, dy = operands()
    exact = jnp.ones_like(x)

    def loss(probe):
        return _again(x, w, dy, probe) + _again(exact, w, dy, probe)

    (both,) = collect({"layer": {"probe": jitted(jax.grad(loss))(jnp.zeros(SHAPE))}}).of(place="fprop.lhs")
    one = statistics(np.asarray(x), QuantSpec(E2M1), 1)["snr_db"]
    assert both.snr_db == pytest.approx(one + 10 * np.log10(2), abs=1e-4)


def test_vmap_gives_a_row_to_each_example_or_averages():
    x, w, dy = operands()
    xs = jnp.stack([x, x[::-1] * 2])

    def sums(x, probe):
        return jax.grad(lambda probe: _again(x, w, dy, probe))(probe)

    each = jitted(jax.vmap(sums))(xs, jnp.zeros((2, *SHAPE)))
    assert {record.index for record in collect({"layer": {"probe": each}}).records} == {(0,), (1,)}
    total = jitted(jax.grad(lambda probe: jnp.sum(jax.vmap(lambda x: _again(x, w, dy, probe))(xs))))(jnp.zeros(SHAPE))
    np.testing.assert_allclose(total, jnp.sum(each, axis=0), rtol=1e-6, atol=1e-6)


def _again(x, w, dy, probe):
    y = fp4jax.dot_general(x, w, NUMBERS, recipe=SMALL)
    return jnp.sum(observe(y, probe, x, w, NUMBERS, SMALL, None) * dy)


def test_eight_devices_on_an_explicit_mesh_measure_what_one_does():
    x, w, dy = operands()
    _, expected = observed(x, w, dy, SMALL)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    put = lambda v, *spec: jax.device_put(v, NamedSharding(mesh, PartitionSpec(*spec)))
    with jax.set_mesh(mesh):
        _, snapshot = observed(put(x, "data"), put(w, None, "model"), put(dy, "data", "model"), SMALL)
    assert len(snapshot.records) == 2
    for one, many in zip(expected.records, snapshot.records, strict=True):
        assert one.place == many.place
        assert_statistics(many.values, one.values)


def test_inside_shard_map_the_parts_of_all_devices_are_averaged():
    x, w, dy = operands()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    rows, whole = PartitionSpec("data"), PartitionSpec()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(rows, whole, rows, whole), out_specs=whole)
    def loss(x, w, dy, probe):
        return jax.lax.psum(_again(x, w, dy, probe), "data")

    with jax.set_mesh(mesh):
        args = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in ((x, rows), (w, whole), (dy, rows))]
        sums = jitted(jax.grad(loss, 3))(*args, jnp.zeros(SHAPE))
    parts = [statistics(np.asarray(x[i : i + 3]), QuantSpec(E2M1), 1) for i in range(0, 24, 3)]
    (record,) = collect({"layer": {"probe": sums}}).of(place="fprop.lhs")
    assert record.calls == 8
    noise = np.mean([10 ** (-part["snr_db"] / 10) for part in parts])
    assert record.snr_db == pytest.approx(-10 * np.log10(noise), abs=1e-4)


def test_no_row_without_a_quantizer():
    recipe = dataclasses.replace(SMALL, dgrad=Gemm(None, None), wgrad=Gemm(REUSE, None))
    _, snapshot = observed(*operands(), recipe)
    assert snapshot.places == ("fprop.lhs",)

"""Instrumented models: same numbers, statistics for every layer, and nothing at all where telemetry is off."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from reference import QUICK, assert_statistics, statistics

import fp4jax
from fp4jax import E2M1, E5M2, Gemm, PerTensor, QuantSpec, Recipe, telemetry
from fp4jax.models import Llama, LlamaConfig, cross_entropy

FORWARD = Recipe("forward", Gemm(QuantSpec(E2M1), None), Gemm(QuantSpec(E5M2, PerTensor()), None))
NOISY = dataclasses.replace(
    FORWARD, name="noisy", fprop=Gemm(QuantSpec(E2M1, rounding=fp4jax.STOCHASTIC), QuantSpec(E2M1))
)
KEYED = dataclasses.replace(
    fp4jax.recipes.fp4_vector(), name="keyed", fprop=Gemm(QuantSpec(E2M1, rounding=fp4jax.STOCHASTIC), QuantSpec(E2M1))
)
"""So does this one's; its weight is rounded to nearest, and so can be prepared."""
CONFIG = LlamaConfig(
    vocab_size=61, num_layers=3, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=24, max_seq_len=24
)
TOKENS = jax.random.randint(jax.random.key(7), (2, 9), 0, CONFIG.vocab_size)


def llama(recipe=FORWARD, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    rules = [("down", recipe), (".*", None)]  # one of seven layers compiles in a fraction of the time
    return Llama(config, rules=rules, rngs=nnx.Rngs(params=0, noise=1))


def language_loss(model, tokens):
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def split(model):
    return nnx.split(model, nnx.Param, telemetry.Probe, ...)


def training(model, with_probes):
    """(loss, gradients of the parameters), and those of the probes if asked."""
    graphdef, params, probes, rest = split(model)

    def loss(params, probes):
        return language_loss(nnx.merge(graphdef, params, probes, rest, copy=True), TOKENS)

    loss, grads = jax.jit(jax.value_and_grad(loss, (0, 1) if with_probes else 0))(params, probes)
    return ((loss, grads[0]), grads[1]) if with_probes else ((loss, grads), None)


def assert_bit_equal(a, b):
    a, b = (jax.tree_util.tree_leaves_with_path(tree) for tree in (a, b))
    assert [path for path, _ in a] == [path for path, _ in b]
    for (path, x), (_, y) in zip(a, b, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


class Block(nnx.Module):
    """A residual layer; stacked by nnx.vmap."""

    def __init__(self, recipe, rngs):
        self.mlp = fp4jax.nn.Linear(16, 16, recipe=recipe, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.mlp(x))


class Stack(nnx.Module):
    """Blocks under nnx.scan, with or without nnx.remat."""

    def __init__(self, recipe, length, rngs, remat=False):
        create = nnx.split_rngs(splits=length)(nnx.vmap(lambda rngs: Block(recipe, rngs)))
        self.blocks = create(rngs)
        self.remat = remat

    def __call__(self, x):
        run = lambda x, block: block(x)
        run = nnx.remat(run) if self.remat else run
        return nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


def square(model, x):
    return jnp.sum(model(x) ** 2)


X = jax.random.normal(jax.random.key(1), (8, 16)) * jnp.exp2(jnp.arange(16.0) % 5)


# --- nothing changes -------------------------------------------------------------------------------------------------


def test_loss_and_gradients_of_a_llama_are_the_same_bits_with_telemetry_on():
    model = llama(NOISY, remat="full")
    plain, _ = training(model, with_probes=False)
    on, sums = training(telemetry.instrument(model), with_probes=True)
    assert_bit_equal(on, plain)
    snapshot = telemetry.collect(sums)
    assert snapshot.layers == ("layers.mlp.down",)
    for place in snapshot.places:
        assert [record.index for record in snapshot.of(place=place)] == [(0,), (1,), (2,)]  # traps 36 and 68
        assert {record.calls for record in snapshot.of(place=place)} == {1}  # remat counts once


@pytest.mark.usefixtures("optimized_programs")
def test_results_of_unrolled_layers_are_the_same_bits_with_telemetry_on():
    recipe = fp4jax.recipes.fp4(quantile="sampled")  # the exact one takes longer to compile than all else
    model = nnx.Sequential(Block(recipe, nnx.Rngs(0)), Block(recipe, nnx.Rngs(1)))
    twin = telemetry.instrument(model)
    plain = jax.jit(lambda model, x: nnx.value_and_grad(square)(model, x))(model, X)
    wrt = nnx.DiffState(0, (nnx.Param, telemetry.Probe))
    loss, gradients = jax.jit(lambda twin, x: nnx.value_and_grad(square, argnums=wrt)(twin, x))(twin, X)
    parameters, sums = nnx.split_state(gradients, nnx.Param, telemetry.Probe)
    assert_bit_equal((loss, parameters), plain)
    snapshot = telemetry.collect(sums)
    assert snapshot.layers == ("layers.0.mlp", "layers.1.mlp")
    assert {record.calls for record in snapshot.records} == {1}


def text_of_step(model):
    graphdef, params, probes, rest = split(model)

    def step(params, rest):
        loss = lambda p: language_loss(nnx.merge(graphdef, p, probes, rest, copy=True), TOKENS)
        return jax.value_and_grad(loss)(params)

    return jax.jit(step).lower(params, rest).as_text()


def test_with_telemetry_off_the_program_is_that_of_the_plain_function():
    model = llama()
    before = text_of_step(model)
    meter = telemetry.Meter(model, language_loss)  # on beside it
    twin = telemetry.instrument(model)
    assert text_of_step(model) == before
    assert text_of_step(llama()) == before  # of a model that telemetry never saw
    # And the twin itself measures nothing where no probe is differentiated: not one reduction more.
    forward = lambda m: jax.jit(lambda tokens: nnx.clone(m)(tokens)).lower(TOKENS).as_text()
    assert forward(twin).count("stablehlo.reduce") == forward(model).count("stablehlo.reduce")
    assert text_of_step(twin).count("stablehlo.reduce") == before.count("stablehlo.reduce")
    on = jax.jit(meter.sums).lower(*meter.arguments(model), TOKENS).as_text()
    assert "custom_call @xla_python" not in on  # no callback to the host
    assert "callback" not in on
    assert len(on) > len(before)


def test_a_meter_does_not_touch_the_model_and_follows_it():
    model = Stack(NOISY, 2, nnx.Rngs(params=0, noise=1))
    before = jax.tree.map(lambda x: x, nnx.state(model, nnx.Not(nnx.RngKey)))
    meter = telemetry.Meter(model, square)
    first, again = meter(model, X), meter(model, X)
    assert first == again  # the same noise: nothing was advanced
    assert_bit_equal(nnx.state(model, nnx.Not(nnx.RngKey)), before)
    kernel = model.blocks.mlp.kernel
    kernel[...] = kernel[...].at[1].set(0)
    (_, changed) = meter(model, X).of("blocks.mlp", "fprop.rhs")
    assert changed.snr_db == np.inf
    with pytest.raises(ValueError, match="the model has another structure than the one this Meter was made for"):
        meter(Stack(FORWARD, 2, nnx.Rngs(0)), X)


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", [False, True])
def test_a_scanned_stack_has_a_row_for_each_block(remat):
    model = Stack(FORWARD, 3, nnx.Rngs(0), remat)
    snapshot = telemetry.Meter(model, square)(model, X)
    numbers, x = (((1,), (0,)), ((), ())), X
    block = jax.jit(lambda x, w: x + jnp.tanh(fp4jax.dot_general(x, w, numbers, recipe=FORWARD)))
    for i, record in enumerate(snapshot.of("blocks.mlp", "fprop.lhs")):
        assert record.label == f"blocks.mlp[{i}]"
        assert_statistics(record.values, statistics(np.asarray(x), QuantSpec(E2M1), 1))
        x = block(x, model.blocks.mlp.kernel[i])
    assert {r.place for r in snapshot.records} == {"fprop.lhs", "dgrad.lhs"}


@pytest.mark.parametrize("remat", [False, True])
def test_forward_statistics_need_no_gradient(remat):
    model = Stack(FORWARD, 3, nnx.Rngs(0), remat)
    twin = telemetry.instrument(model)
    run = nnx.jit(lambda twin, x: telemetry.capture(lambda model, x: model(x), twin, x))
    out, sums = run(twin, X)
    np.testing.assert_allclose(out, model(X), rtol=1e-6)
    captured = telemetry.collect(sums)
    backward = telemetry.Meter(model, square)(model, X)
    assert captured.places == ("fprop.lhs",)
    for one, other in zip(captured.records, backward.of(place="fprop.lhs"), strict=True):
        assert (one.layer, one.index, one.calls) == (other.layer, other.index, 1)
        assert_statistics(one.values, other.values)
    assert not hasattr(twin.blocks.mlp.dot_general, "__captures__")


def test_vmap_over_models_gives_each_its_statistics():
    create = nnx.vmap(lambda key: Stack(FORWARD, 2, nnx.Rngs(key)))
    graphdef, probes, state = nnx.split(telemetry.instrument(Stack(FORWARD, 2, nnx.Rngs(0))), telemetry.Probe, ...)
    _, states = nnx.split(create(jax.random.split(jax.random.key(0), 4)))
    sums = jax.vmap(lambda s: jax.grad(lambda p: square(nnx.merge(graphdef, p, s, copy=True), X))(probes))
    snapshot = telemetry.collect(jax.jit(sums, compiler_options=QUICK)(states))
    assert [r.index for r in snapshot.of(place="fprop.lhs")] == [(m, b) for m in range(4) for b in range(2)]
    assert state is not None


def test_eight_devices_measure_a_model_as_one_does():
    model = Stack(FORWARD, 2, nnx.Rngs(0))
    expected = telemetry.Meter(model, square)(model, X)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        model = jax.tree.map(lambda v: jax.device_put(v, NamedSharding(mesh, PartitionSpec())), model)
        sharded = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
        snapshot = telemetry.Meter(model, square)(model, sharded)
    for one, many in zip(expected.records, snapshot.records, strict=True):
        assert one.label == many.label
        for name, value in one.values.items():
            np.testing.assert_allclose(many.values[name], value, rtol=1e-3, atol=1e-6, err_msg=name)


class Zoo(nnx.Module):
    """A layer of every kind that can follow a recipe."""

    def __init__(self, recipe, rngs):
        dot = fp4jax.DotGeneral(recipe)
        self.stock = nnx.Linear(16, 16, dot_general=dot, rngs=rngs)
        self.general = nnx.LinearGeneral((4, 4), (2, 8), axis=(-2, -1), dot_general=dot, rngs=rngs)
        self.einsum = nnx.Einsum("bij,ijk->bk", (2, 8, 16), einsum_op=fp4jax.nn.DotEinsum(dot), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2, 16, decode=False, qkv_dot_general=dot, out_dot_general=dot, rngs=rngs
        )
        self.plain = nnx.Linear(16, 16, rngs=rngs)
        self.wide = nnx.Linear(16, 16, dot_general=fp4jax.DotGeneral(fp4jax.recipes.bf16()), rngs=rngs)

    def __call__(self, x):
        x = self.einsum(self.general(self.stock(x).reshape(-1, 4, 4)))
        return self.wide(self.plain(self.attention(x[None])[0]))


def test_layers_of_every_kind_are_found():
    model = Zoo(FORWARD, nnx.Rngs(0))
    twin = telemetry.instrument(model)
    out, sums = nnx.jit(lambda m, x: telemetry.capture(lambda m, x: m(x), m, x))(twin, X)
    assert_bit_equal(out, nnx.jit(lambda m, x: m(x))(model, X))
    attention = [f"attention.{name}" for name in ("key", "out", "query", "value")]
    assert sorted(telemetry.collect(sums).layers) == [*attention, "einsum", "general", "stock"]
    assert nnx.state(twin, nnx.Param).keys() == nnx.state(model, nnx.Param).keys()


def test_a_converted_model_of_blocks_with_several_recipes():
    rules = [(r"blocks\.0\.", None), (".*", FORWARD)]
    model = fp4jax.nn.quantize_model(Runs(FORWARD, 3, nnx.Rngs(0)), rules)
    snapshot = telemetry.Meter(model, square)(model, X)
    assert [record.index for record in snapshot.of(place="fprop.lhs")] == [(1,), (2,)]  # block 0 is left alone
    with pytest.raises(
        ValueError, match=r"nothing can be recorded for blocks.mlp.dot_general, whose .* take gradients"
    ):
        telemetry.capture(lambda m, x: m(x), telemetry.instrument(model), X)
    with pytest.raises(ValueError, match="the blocks of a stack follow different recipes"):
        telemetry.switchable(model)


class Runs(Stack):
    """A stack that takes a recipe for each block."""

    splits_runs = ("blocks",)

    def __call__(self, x):
        runs = fp4jax.nn.split_runs(self.blocks)
        for run in runs:
            x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, run)
        fp4jax.nn.join_runs(self.blocks, runs)
        return x


def test_forward_statistics_of_unstacked_blocks_are_refused():
    model = llama(scan_layers=False)

    def run(tokens):
        return telemetry.capture(lambda model, tokens: model(tokens), telemetry.instrument(model), tokens)

    with pytest.raises(ValueError, match=r"nothing was recorded for layers.mlp.down.dot_general: .*scan_layers=False"):
        jax.make_jaxpr(run)(TOKENS)


def test_an_operand_that_was_quantized_beforehand_is_measured_too():
    layer = fp4jax.nn.Linear(16, 16, recipe=FORWARD, rngs=nnx.Rngs(0))
    numbers, prepared = (((1,), (0,)), ((), ())), fp4jax.DotGeneral(FORWARD).prepare_lhs(X)
    multiply = lambda layer, x: layer.dot_general(x, layer.kernel[...], numbers)
    out, sums = telemetry.capture(multiply, telemetry.instrument(layer), prepared)
    assert_bit_equal(out, multiply(layer, X))
    (record,) = telemetry.collect(sums).records
    assert_statistics(record.values, statistics(np.asarray(X), QuantSpec(E2M1), 1))
    assert_bit_equal(multiply(telemetry.switchable(layer), prepared), out)


class Sandwich(nnx.Module):
    """A layer named as the attribute that holds a product without its preparation, and a stack."""

    def __init__(self, recipe, rngs):
        self.product = fp4jax.nn.Linear(16, 16, recipe=recipe, rngs=rngs)
        self.stack = Stack(recipe, 2, rngs)

    def __call__(self, x):
        return self.stack(self.product(x))


@pytest.mark.parametrize("recipe", [fp4jax.recipes.fp4_vector(), KEYED], ids=["plain", "keyed"])
def test_a_model_that_uses_prepared_weights_is_measured_as_without(recipe):
    model = Sandwich(recipe, nnx.Rngs(params=0, noise=1))
    model.eval()  # so that the noise is that of one call
    prepared = fp4jax.nn.use_prepared(nnx.clone(model), fp4jax.nn.prepare_weights(model))
    assert isinstance(prepared.product.dot_general, fp4jax.nn.PreparedDotGeneral)
    assert telemetry.Meter(prepared, square)(prepared, X) == telemetry.Meter(model, square)(model, X)
    assert_bit_equal(telemetry.switchable(prepared).product(X), telemetry.switchable(model).product(X))
    with pytest.raises(ValueError, match=r"product is instrumented already: its product is a (Keyed)?Tap"):
        telemetry.instrument(telemetry.instrument(prepared))
    weights = telemetry.oscillation.weights_of
    assert weights(prepared) == weights(model)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_nothing_to_measure_is_an_error_that_says_what_would_be():
    for model in (
        nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
        fp4jax.nn.Linear(4, 4, recipe=fp4jax.recipes.bf16(), rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(
            ValueError, match=r"the model has no product to measure: .*pass recipe= to fp4jax.nn.Linear"
        ):
            telemetry.instrument(model)
    with pytest.raises(ValueError, match=r"the model is not instrumented; pass telemetry.instrument\(model\)"):
        telemetry.capture(lambda m, x: m(x), fp4jax.nn.Linear(4, 4, recipe=FORWARD, rngs=nnx.Rngs(0)), X)
    with pytest.raises(ValueError, match="no statistics found: pass the gradients of an instrumented model"):
        telemetry.collect({"kernel": jnp.ones(3)})


def test_a_twin_has_no_twin():
    twin = telemetry.instrument(fp4jax.nn.Linear(4, 4, recipe=FORWARD, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="the model is instrumented already: its product is a Tap"):
        telemetry.instrument(twin)


class Own(nnx.Module):
    """Somebody's layer with a kernel [2, 4, 4]: two layers stacked, or one with three axes?"""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (2, 4, 4)))
        self.dot_general = fp4jax.DotGeneral(FORWARD)

    def __call__(self, x):
        return self.dot_general(x, self.kernel[...], (((1,), (0,)), ((), ())))


def test_a_module_of_ones_own_says_how_it_is_stacked():
    own = Own(nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"this Own with a kernel of shape \(2, 4, 4\) is stacked; pass stacked=lambda"
    ):
        telemetry.instrument(own)
    twin = telemetry.instrument(own, stacked=lambda path: (2,))
    assert twin.dot_general.probe.shape[0] == 2
    run = lambda x, layer: layer(x)
    scanned = lambda m, x: jnp.sum(nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, m))
    snapshot = telemetry.Meter(own, scanned, stacked=lambda path: (2,))(own, X[:, :4])
    assert [record.index for record in snapshot.of(place="fprop.lhs")] == [(0,), (1,)]


# --- switches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [fp4jax.recipes.fp4_vector(), NOISY])
def test_switches_quantize_the_blocks_that_are_on(recipe):
    model = Stack(recipe, 2, nnx.Rngs(params=0, noise=3))
    twin = telemetry.switchable(model)
    run = jax.jit(lambda state, x: nnx.merge(nnx.graphdef(twin), state, copy=True)(x))

    def with_blocks(*on):
        state = nnx.state(twin)
        state["blocks"]["mlp"]["dot_general"]["on"] = telemetry.On(jnp.array(on))
        return np.asarray(run(state, X))

    def by_hand(*on):
        x = X
        for i, quantized in enumerate(on):
            block = jax.tree.map(lambda v, i=i: v[i], nnx.clone(model.blocks))
            if not quantized:
                block.mlp.dot_general = nnx.data(lambda lhs, rhs, *a, **k: jax.lax.dot_general(lhs, rhs, *a, **k))
            x = block(x)
        return np.asarray(x)

    for on in ((True, True), (False, False), (True, False)):
        np.testing.assert_allclose(with_blocks(*on), by_hand(*on), rtol=1e-5)
    assert not np.array_equal(with_blocks(True, False), with_blocks(True, True))

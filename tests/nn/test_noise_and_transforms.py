"""A quantized model under jit, scan, vmap, remat and meshes; its noise; stacks, and runs of blocks of equal recipe."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stock
from flax import nnx

import fp4jax
from fp4jax.nn import Blocks, describe_model, join_runs, keep_blocks, quantize_model, set_noise_step, split_runs

FP4 = fp4jax.recipes.fp4_vector()
NOISY = dataclasses.replace(
    FP4,
    name="noisy",
    fprop=dataclasses.replace(FP4.fprop, lhs=fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)),
)
X = jax.random.normal(jax.random.key(0), (8, 16))
call = nnx.jit(lambda model, x: model(x))


def noisy(model, rules=((".*", NOISY),), seed=1):
    return quantize_model(model, rules, rngs=nnx.Rngs(noise=seed))


def plain():
    return nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))


def scanned(**options):
    return stock.Scanned(16, 3, rngs=nnx.Rngs(0), **options)


def streams(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.RngState))


# --- noise ---------------------------------------------------------------------------------------------------------


def test_a_stochastic_recipe_asks_for_rngs():
    message = r"rngs=None, but layer 'up' is to round stochastically \(recipe 'noisy'\); pass rngs=nnx\.Rngs\(noise=0\)"
    with pytest.raises(ValueError, match=message):
        quantize_model(nnx.Dict(up=plain()), [(".*", NOISY)])
    with pytest.raises(
        ValueError, match=r"rngs has neither a stream 'noise' nor a default one; pass nnx\.Rngs\(noise=0\)"
    ):
        quantize_model(plain(), [(".*", NOISY)], rngs=nnx.Rngs(params=0))
    with pytest.raises(ValueError, match=r"rngs holds noise keys of shape \(2,\); quantize_model needs one"):
        quantize_model(plain(), [(".*", NOISY)], rngs=nnx.Rngs(noise=jax.random.split(jax.random.key(0))))


def test_draws_differ_by_layer_and_step_and_evaluation_draws_none():
    model = noisy(nnx.List([plain(), plain()]))
    first, second = (call(model[0], X) for _ in range(2))
    assert bool(jnp.any(first != second))
    assert bool(jnp.any(first != call(model[1], X)))
    model.eval()
    np.testing.assert_array_equal(call(model[0], X), call(model[0], X))
    model.train()
    set_noise_step(model, 0)
    np.testing.assert_array_equal(call(model[0], X), first)


def test_the_noise_of_a_layer_depends_on_seed_and_path_alone():
    few = noisy(nnx.Dict(a=plain(), b=plain()), [("a", NOISY), ("b", None)])
    all_ = noisy(nnx.Dict(a=plain(), b=plain()))
    np.testing.assert_array_equal(call(few.a, X), call(all_.a, X))
    assert bool(jnp.any(call(all_.a, X) != call(all_.b, X)))
    assert bool(jnp.any(call(noisy(nnx.Dict(a=plain(), b=plain()), seed=2).a, X) != call(few.a, X)))


def test_another_recipe_goes_on_with_the_noise_and_keeps_eval():
    model = noisy(plain())
    call(model, X), model.eval()
    other = dataclasses.replace(NOISY, name="other")
    quantize_model(model, [(".*", other)])
    assert int(model.dot_general.stream.count[...]) == 1
    assert model.dot_general.deterministic
    quantize_model(model, [(".*", FP4)])
    assert not streams(model)


def test_a_raw_jit_that_closes_over_the_model_says_so():
    model = noisy(plain())
    with pytest.raises(Exception, match="Cannot mutate RngCount from a different trace level"):
        jax.jit(lambda x: model(x))(X)


# --- stacks --------------------------------------------------------------------------------------------------------


def test_stacked_layers_draw_a_key_each_with_and_without_remat():
    model, remat = noisy(scanned()), noisy(scanned(remat=True))
    state = streams(model)["layers"]["linear"]["dot_general"]["stream"]
    assert state["key"].shape == state["count"].shape == (3,)
    assert len(np.unique(jax.random.key_data(state["key"]), axis=0)) == 3
    grads = nnx.jit(nnx.value_and_grad(lambda model: (model(X) ** 2).mean()))
    expected, actual = grads(model), grads(remat)
    np.testing.assert_array_equal(streams(model)["layers"]["out"]["dot_general"]["stream"]["count"], [1, 1, 1])
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), actual, expected)
    assert float(grads(model)[0]) != float(expected[0])


def test_a_scan_equals_its_unrolled_loop():
    model = quantize_model(scanned(), [("head", None), (".*", FP4)])

    @nnx.jit
    def loop(model, x):
        for i in range(3):
            block = quantize_model(stock.Block(16, rngs=nnx.Rngs(0)), [(".*", FP4)])
            nnx.update(block, jax.tree.map(lambda a, i=i: a[i], nnx.state(model.layers)))
            x = block(x)
        return model.head(x)

    np.testing.assert_allclose(call(model, X), loop(model, X), rtol=1e-5, atol=1e-5)


class Dropped(stock.Scanned):
    """Scans with dropout keys split at each call, as the guide on randomness has it."""

    def __call__(self, x):
        axes = nnx.StateAxes({(nnx.Param, nnx.RngState) if self.maps_noise else nnx.Param: 0, ...: None})

        @nnx.split_rngs(splits=3)
        @nnx.scan(in_axes=(nnx.Carry, axes), out_axes=nnx.Carry)
        def run(x, block):
            return block(x)

        return run(x, self.layers)


def test_noise_that_a_scan_does_not_map_says_how_to_map_it():
    model = noisy(Dropped(16, 3, rngs=nnx.Rngs(0)), [("head", None), (".*", NOISY)])
    model.maps_noise = False
    with pytest.raises(ValueError, match=r"noise keys of a whole stack, shape \(3,\).* Map nnx\.RngState as well"):
        model(X)
    model.maps_noise = True
    assert bool(jnp.all(jnp.isfinite(call(model, X))))


@pytest.mark.parametrize("pattern", [r"layers\.0", r"layers\.(1|2)\.linear|head", Blocks("layers", (-1,))])
def test_single_blocks_of_a_foreign_stack_are_refused(pattern):
    message = (
        r"is a stack of 3 blocks \(kernel \(3, 16, 16\)\) that run as one, so they share a recipe, but the rules give "
        r"them .*None.*\. Give all blocks the same, or build them one by one, in an nnx\.List"
    )
    with pytest.raises(ValueError, match=message):
        quantize_model(scanned(), [(pattern, None), (".*", FP4)])


def test_rules_for_all_blocks_hold_for_a_stack():
    model = quantize_model(scanned(), [(r"layers\.\d+\.linear", None), ("layers.out", FP4), ("head", None)])
    assert [row.path for row in describe_model(model).layers if row.recipe] == ["layers.out"]


def test_layers_stacked_along_another_axis_are_refused():
    model = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: nnx.Linear(16, 8, rngs=rngs), out_axes=1))(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"kernel has shape \(16, 3, 8\), which is not a stack of kernels \(16, 8\)"):
        quantize_model(model, [(".*", FP4)])


# --- runs of equal recipe ------------------------------------------------------------------------------------------


class Runs(stock.Scanned):
    splits_runs = ("layers",)

    def __call__(self, x):
        runs = split_runs(self.layers)
        for run in runs:
            x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, run)
        join_runs(self.layers, runs)
        return self.head(x)


RULES = [keep_blocks("layers", first=1), ("layers.2.out", FP4), ("layers", NOISY), ("head", None)]


def test_blocks_that_differ_run_as_runs_of_equal_recipe():
    model = noisy(Runs(16, 3, rngs=nnx.Rngs(0)), RULES)
    rows = {row.path: row.cells()[3] for row in describe_model(model).layers}
    assert rows["layers.out"] == "0: –, 1: noisy, 2: fp4_vector"
    assert rows["layers.linear"] == "0: –, 1–2: noisy"
    assert describe_model(model).covered == (1 + 1 + 2) * 16 * 16
    assert [jax.tree.leaves(nnx.state(run, nnx.Param))[0].shape[0] for run in split_runs(model.layers)] == [1, 1, 1]
    call(model, X)
    count = {name: streams(model)["layers"][name]["dot_general"]["stream"]["count"] for name in ("linear", "out")}
    assert count["linear"].tolist() == [0, 1, 1]
    assert count["out"].tolist() == [0, 1, 0]

    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    explanation = fp4jax.explain(lambda p: nnx.merge(graphdef, p, rest, copy=True)(X), params)
    assert [(p.kind, p.recipe) for p in explanation.products] == [
        *[("plain", "-")] * 2,
        *[("fprop", "noisy")] * 3,
        ("fprop", "fp4_vector"),
        ("plain", "-"),
    ]


def test_runs_equal_the_blocks_one_by_one_and_so_do_their_gradients():
    model = quantize_model(Runs(16, 3, rngs=nnx.Rngs(0)), [keep_blocks("layers", last=1), ("head", None), (".*", FP4)])

    @nnx.jit
    def by_runs(model):
        return nnx.value_and_grad(lambda model: (model(X) ** 2).mean())(model)

    @nnx.jit
    def one_by_one(model):
        def loss(model):
            x = X
            for i in range(3):
                block = stock.Block(16, rngs=nnx.Rngs(0))
                nnx.update(block, jax.tree.map(lambda a, i=i: a[i], nnx.state(model.layers, nnx.Param)))
                x = quantize_model(block, [(".*", None if i == 2 else FP4)])(x)
            return (model.head(x) ** 2).mean()

        return nnx.value_and_grad(loss)(model)

    actual, expected = by_runs(model), one_by_one(model)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6), actual, expected)


def test_equal_recipes_are_one_run_and_differing_ones_cannot_run_unsplit():
    model = quantize_model(Runs(16, 3, rngs=nnx.Rngs(0)), [(".*", FP4)])
    assert split_runs(model.layers) == [model.layers]
    quantize_model(model, [keep_blocks("layers", first=1), (".*", FP4)])
    with pytest.raises(
        ValueError, match=re.escape("follow different recipes (None, fp4_vector, fp4_vector); run the bl")
    ):
        stock.Scanned.__call__(model, X)
    graphdef = nnx.graphdef(Runs(16, 3, rngs=nnx.Rngs(0)))
    assert nnx.graphdef(quantize_model(model, [(".*", None)])) == graphdef


# --- other transformations and meshes ------------------------------------------------------------------------------


def test_vmap_over_models():
    model = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: nnx.Linear(16, 16, use_bias=False, rngs=rngs)))(nnx.Rngs(0))
    noisy(model)
    out = nnx.jit(nnx.vmap(lambda model, x: model(x), in_axes=(0, None)))(model, X)
    single = plain()
    jitted = jax.jit(lambda x, w, key: fp4jax.dot_general(x, w, (((1,), (0,)), ((), ())), recipe=NOISY, key=key))
    for i in range(2):
        nnx.update(single, {"kernel": model.kernel[...][i]})
        key = jax.random.fold_in(model.dot_general.stream.key[...][i], 0)
        expected = jitted(X, single.kernel[...], key)
        np.testing.assert_allclose(out[i], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto])
def test_eight_devices_compute_what_one_does(kind):
    def create():
        return quantize_model(stock.Block(16, rngs=nnx.Rngs(0)), [(".*", FP4)])

    grads = nnx.jit(lambda model, x: nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model))
    expected = grads(create(), X)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        model = create()
        nnx.update(model, jax.device_put(nnx.state(model), jax.NamedSharding(mesh, jax.P())))
        actual = grads(model, jax.device_put(X, jax.NamedSharding(mesh, jax.P("data"))))
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), actual, expected)


def test_an_abstract_model_can_be_quantized():
    model = nnx.eval_shape(lambda: noisy(scanned()))
    assert describe_model(model).share > 0.9
    assert streams(model)["layers"]["out"]["dot_general"]["stream"]["key"].shape == (3,)


def test_a_view_for_evaluation_does_not_advance_the_noise():
    model = fp4jax.nn.quantize_model(
        nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0))), [(".*", NOISY)], rngs=nnx.Rngs(noise=1)
    )
    x = jnp.linspace(-1.0, 1.0, 8)[None]
    fixed = nnx.view(model, deterministic=True)
    np.testing.assert_array_equal(fixed(x), fixed(x))
    assert (model(x) != model(x)).any()
